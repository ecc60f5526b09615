"""The `carpool` command, run in the test's own process."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """How a run of the command ended."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]
