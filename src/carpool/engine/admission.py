"""Admission control: reject new requests that would miss their deadline or wait too long.

That is when the predicted queue wait exceeds `max_wait`, or the predicted time the deadline. The
engine's thread reports the queue, the running requests and the durations of forwards at every turn;
`refusal` and the rest may be called from any thread: they read single numbers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from carpool.config import EngineSettings
from carpool.engine.prediction import Predictor
from carpool.engine.queue import RequestQueue
from carpool.engine.request import RequestState
from carpool.errors import CarpoolError
from carpool.schedule.overload import Overload, Speed, bounded
from carpool.types import CheckedRequest, Clock


class AdmissionControl:
    """The overload stage of one engine: see `carpool.schedule.overload`."""

    def __init__(
        self, queue: RequestQueue, settings: EngineSettings, predictor: Predictor, clock: Clock
    ) -> None:
        self._predictor, self._clock, self._queue = predictor, clock, queue
        self._overload = Overload(settings.max_wait, admits_late=settings.admit_late)
        self._max_queue, self._max_running = settings.max_queue, settings.max_running
        self._speed: Speed | None = None  # None until predictions are proven
        self._seen_requests, self._waiting_s = 0, 0.0  # queued, and their predicted work, last turn
        self._newest_s = 0.0  # work of the newest request: a guess for those queued since
        self._lefts_s: Sequence[float] = ()  # predicted remaining work of running requests

    @property
    def stage(self) -> int:
        return self._overload.stage

    @property
    def is_informed(self) -> bool:
        """Whether it has learned from a forward."""
        return self._speed is not None

    def learn(self, alone_s: float, calls: int, together_s: float, times: int = 1) -> None:
        """Learn the speed from forwards: their calls would take `alone_s` one after another."""
        self._speed = self._speed or Speed()
        self._speed.learn(alone_s, calls, together_s, times)

    def update(self, waiting: int, waiting_s: float, lefts_s: Sequence[float]) -> None:
        """Set the number and predicted work of queued requests, and running requests' work."""
        self._seen_requests, self._waiting_s, self._lefts_s = waiting, waiting_s, lefts_s
        if waiting or self._overload.stage:  # else it stays 0
            self._update_stage()

    def estimate(self, request: CheckedRequest) -> tuple[float | None, float, float]:
        """Predict the time of a request that arrives now; from any thread.

        Returns:
            Seconds of its denoising steps alone on the device, None without data; the predicted
            wait; and the speed of shared forwards, relative to running all alone.
        """
        predictor, alone_s = self._predictor, None
        if predictor.is_informed(request):
            alone_s = predictor.whole_s(request) * predictor.costs.slowdown
        return alone_s, self.wait_s, self.speed

    def refusal(
        self, request: CheckedRequest, running: Iterable[RequestState], waited_s: float = 0.0
    ) -> CarpoolError | None:
        """The refusal of a new request that would miss its deadline or wait too long, if any.

        Predicted by the durations of forwards so far: it runs alone, after the running requests
        with earlier deadlines. With `admit_late` a late request is only logged.

        Args:
            waited_s: seconds it waited elsewhere.

        Returns:
            `TooLate`: its deadline cannot be met. `Overloaded`: with the time to retry.
        """
        predictor, whole_s = self._predictor, self._predictor.whole_s(request)
        try:
            if request.deadline_s is not None and predictor.is_informed(request):
                due_s = self._clock() + request.deadline_s - waited_s
                before = [state.parked for state in running]
                ahead_s = sum(call.left_s for call in before if call and call.deadline_s <= due_s)
                end_s = waited_s + (whole_s + ahead_s) * predictor.costs.slowdown
                self._overload.check_deadline(request.request_id, request.deadline_s, end_s)
            self._newest_s = whole_s
            (wait_s, fill), least_s = self._update_stage(), self.place_s or 0.0
            self._overload.check_wait(
                request.priority,
                waiting=len(self._queue),
                wait_s=wait_s,
                fill=fill,
                least_s=least_s,
            )
        except CarpoolError as error:
            return error
        return None

    @property
    def place_s(self) -> float | None:
        """Predicted seconds until the next place is free; None without data."""
        speed, lefts_s = self._speed, list(self._lefts_s)
        seconds = None if speed is None else speed.place_s(lefts_s)
        return None if seconds is None else bounded(seconds * self._predictor.costs.slowdown)

    def starts_s(self, queued: Sequence[RequestState], running: int) -> list[float | None]:
        """Predicted seconds until each queued request starts, in queue order.

        Args:
            running: number of running requests.
        """
        places = self._max_running - running
        if self._speed is None:
            return [None] * len(queued)
        works_s = [job.queued.left_s if job.queued else self._newest_s for job in queued]
        starts_s = self._speed.starts_s(list(self._lefts_s), places, works_s)
        return [start_s * self._predictor.costs.slowdown for start_s in starts_s]

    def to_json(self) -> dict[str, Any]:
        """For `statistics`."""
        return {"stage": self.stage, "wait_s": self.wait_s}

    @property
    def speed(self) -> float:
        """Seconds of lone work done by one second of shared forwards."""
        return 1.0 if self._speed is None else self._speed.speed

    @property
    def wait_s(self) -> float:
        """Predicted seconds until the current queue is done."""
        if self._speed is None:
            return 0.0
        unseen = max(0, len(self._queue) - self._seen_requests)
        work_s = (self._waiting_s + unseen * self._newest_s) * self._predictor.costs.slowdown
        return self._speed.wait_s(work_s)

    def _update_stage(self) -> tuple[float, float]:
        wait_s, places = self.wait_s, self._max_queue + self._max_running - len(self._lefts_s)
        fill = len(self._queue) / places if places > 0 else 0.0
        self._overload.update(wait_s, fill)
        return wait_s, fill
