"""The load of one engine, for the router that sends it requests."""

from collections.abc import Mapping
from dataclasses import dataclass

from carpool.types import RequestSize


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The costs of steps, and the remaining steps of running requests."""

    step_costs: Mapping[RequestSize, list[float]]  # seconds, by number of sharing requests
    text_costs: Mapping[str, tuple[float, list[float]]]  # tokens, and a token's seconds, by writer
    steps_left: Mapping[str, float]  # keyed by request id; tokens for texts
    shares_sweeps: bool  # streamed weights: requests of all sizes share every step
    place_s: float | None  # predicted seconds until the next request can start; None: unknown
    private: Mapping[str, str]  # why requests ride alone, by task
