"""The boundaries of a turn: an exception stops at the stage that raised it.

A turn consists of named stages, each with one boundary. Decisions, predictions and records of the
engine (choices, costs, statistics, timelines, journals) have a substitute: `Stages.contain` logs
the exception and returns that. An exception in work for one request ends that request: see
`RunningRequests`. Each boundary is a fault point by its stage's name: see `faults.py`.
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
"""The stages with a substitute: all requests continue."""
RequestStage = Literal["start", "resume", "convert"]
"""The stages of one request: a failure ends it."""

T = TypeVar("T")


class EngineLost(BaseException):
    """The engine cannot continue: its device has failed, or requests are not isolated.

    No boundary stops it on its way out of the engine's loop.
    """


UNCONTAINED = (EngineLost, FiberExit)
"""No boundary stops these; all others are stopped, `SystemExit` included."""


class Stages:
    """The boundaries of one engine.

    Args:
        faults: the injected faults; None: no fault injection.
    """

    def __init__(self, faults: "Faults | None" = None) -> None:
        self._faults, self.has_faults = faults, faults is not None
        self._logged: set[tuple[str, type]] = set()

    def reach(
        self,
        stage: RequestStage | TurnStage | Literal["turn"],
        states: "Iterable[RequestState]" = (),
    ) -> None:
        """A fault point: raise the faults due in a stage for these requests."""
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
        """Return the result of some work, or the substitute if it raises."""
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
        """Log the first exception of its class in a stage, with its traceback."""
        kind = stage, type(error)
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("stage %r of a turn failed; it goes on without that", stage, exc_info=error)
