"""Faults on purpose: what the tests of everything that must survive them switch on.

A fault is `POINT:WHAT:WHEN`. The points are in the loop's code, so that a fault comes from where a
real one would: `forward` is between the start of a forward's clock and the modules.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from carpool.engine.execute import Run
from carpool.engine.intercept import Call
from carpool.errors import InvalidValue

POINTS = ("forward",)


def _exhaust() -> None:
    raise torch.OutOfMemoryError("a fault on purpose: no memory")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(3600)


WHATS: dict[str, Callable[[], None]] = {"memory": _exhaust, "kill": _kill, "hang": _hang}


class Faults:
    """Those that are switched on.

    Args:
        wanted: `POINT:WHAT:WHEN` each. WHEN is the probability at each passing of the point, or
            `seed=N` for those at which a request with this seed is aboard.
        seed: of the dice.

    Raises:
        InvalidValue: a fault that does not exist.
    """

    def __init__(self, wanted: Sequence[str], seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._all = [_parsed(text) for text in wanted]

    def around(self, run: Run, seeds: Mapping[int, int]) -> Run:
        """The same forward, which may fail.

        Args:
            seeds: of the requests, by the `id` of their calls.
        """
        if not self._all:
            return run

        def struck(calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
            self.pass_by("forward", {seeds[id(call)] for call in calls})
            return run(calls, rows)

        return struck

    def pass_by(self, point: str, seeds: set[int]) -> None:
        """Strike, if it is time to, whoever passes this point."""
        for where, what, probability, seed in self._all:
            if where == point and (seed in seeds or self._dice.random() < probability):
                WHATS[what]()


def _parsed(text: str) -> tuple[str, str, float, int | None]:
    point, what, when = [*text.split(":", 2), "", ""][:3]
    rule = f"must be POINT:WHAT:WHEN with POINT of {', '.join(POINTS)}, WHAT of {', '.join(WHATS)}"
    if point not in POINTS or what not in WHATS:
        raise InvalidValue(f"fault {text!r}: {rule}")
    try:
        if when.startswith("seed="):
            return point, what, 0.0, int(when.removeprefix("seed="))
        probability = float(when)
    except ValueError:
        probability = -1.0
    if not 0 <= probability <= 1:
        raise InvalidValue(f"fault {text!r}: {rule}, WHEN a probability or seed=N")
    return point, what, probability, None
