"""The boundaries of a turn: an exception stops at the stage that it comes from.

A turn is made of named stages, and each has one boundary. What the engine decides, predicts or
notes (choices, costs, statistics, timelines, journals) has a substitute: `Stages.contain` logs the
exception and gives that. What it does for one request ends that request: see `RunningRequests`.
Each boundary is a fault point by its stage's name: see `faults.py`.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from carpool.engine.fiber import FiberExit

if TYPE_CHECKING:
    from carpool.engine.faults import Faults
    from carpool.engine.request import RequestState

log = logging.getLogger("carpool")

TurnStage = Literal[
    "admit", "cache", "choose", "count", "describe", "effects", "journal", "learn", "observe",
    "parked", "predict", "preview", "queued", "steps", "tell", "timeline", "unwind",
]  # fmt: skip
"""The stages that have a substitute: all requests go on."""
RequestStage = Literal["start", "resume", "convert"]
"""The stages of one request, which fails with them."""

T = TypeVar("T")


class EngineLost(BaseException):
    """Nothing more may run in this engine: its device has failed, or requests are not isolated.

    No boundary stops it on its way out of the engine's loop.
    """


UNCONTAINED = (EngineLost, FiberExit)
"""What no boundary stops; every other exception it does, `SystemExit` and the like included."""


class Stages:
    """The boundaries of one engine.

    Args:
        faults: those that are switched on.
    """

    def __init__(self, faults: "Faults | None" = None) -> None:
        self._faults, self.has_faults = faults, faults is not None
        self._logged: set[tuple[str, type]] = set()

    def reach(
        self,
        stage: RequestStage | TurnStage | Literal["turn"],
        states: "Iterable[RequestState]" = (),
    ) -> None:
        """A fault point: raises the faults that are due in a stage about these requests."""
        if self._faults is not None:
            self._faults.strike(stage, states)

    def contain(
        self,
        stage: TurnStage,
        substitute: T,
        work: Callable[..., T],
        *args: Any,
        states: "Iterable[RequestState]" = (),
    ) -> T:
        """The result of some work, or the substitute if it raises."""
        try:
            result = work(*args)
            if self.has_faults:
                self.reach(stage, states)
            return result
        except UNCONTAINED:
            raise
        except BaseException as error:
            self._report(stage, error)
            return substitute

    def _report(self, stage: TurnStage, error: BaseException) -> None:
        """Log an exception with its traceback, the first of its class in a stage."""
        kind = stage, type(error)
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("a turn goes on without its stage %r, which failed", stage, exc_info=error)
