"""Admission control: reject new requests when the predicted queue wait exceeds `max_wait`.

The engine's thread reports at every turn what is queued, what runs and what forwards take; `check`
and the rest may be called from any thread: they read single numbers.
"""

from collections.abc import Sequence
from typing import Any

from carpool.config import EngineSettings
from carpool.engine.queue import RequestQueue
from carpool.engine.request import RequestState
from carpool.errors import Overloaded
from carpool.schedule.overload import ENTER, Pressure, Speed, again_s, bounded, refuses, stage


class AdmissionControl:
    """The overload stage of one engine: see `carpool.schedule.overload`."""

    def __init__(self, queue: RequestQueue, settings: EngineSettings) -> None:
        self._queue, self._most_s = queue, settings.max_wait
        self._max_queue, self._max_running = settings.max_queue, settings.max_running
        self._speed: Speed | None = None  # until predictions are proven
        self._seen, self._waiting_s = 0, 0.0  # queued requests and their predicted work
        self._newest_s = 0.0  # work of the newest request: a guess for those not seen yet
        self._lefts_s: Sequence[float] = ()  # predicted work left of running requests
        self.stage = 0

    @property
    def is_informed(self) -> bool:
        """Whether it has learned anything."""
        return self._speed is not None

    def learn(self, alone_s: float, calls: int, together_s: float) -> None:
        """A forward of several calls took so long; one after another they would take `alone_s`."""
        self._speed = self._speed or Speed()
        self._speed.learn(alone_s, calls, together_s)

    def update(self, waiting: int, waiting_s: float, lefts_s: Sequence[float]) -> None:
        """How many are queued, their predicted work, and what running ones have left of theirs."""
        self._seen, self._waiting_s, self._lefts_s = waiting, waiting_s, lefts_s
        if waiting or self.stage:  # else it stays 0
            self._update_stage()

    def check(self, priority: int, whole_s: float) -> None:
        """Refuse a new request if its priority is too low for the overload stage.

        Args:
            whole_s: its predicted work, seconds alone on the device.

        Raises:
            Overloaded: with when the wait will be short enough.
        """
        self._newest_s = whole_s
        wait_s, fill = self._update_stage()
        if refuses(self.stage, priority) and fill < 1:  # a full queue has an error of its own
            which = "no new one" if self.stage == 3 else "none of priority below 0"
            raise Overloaded(
                f"the server is overloaded: {len(self._queue)} requests wait, with work for some "
                f"{wait_s:.3g} s (the most is {self._most_s:g} s, --max-wait): {which} is taken",
                retry_after_s=max(again_s(self.stage, wait_s, self._most_s), self.place_s or 0.0),
            )

    @property
    def place_s(self) -> float | None:
        """Predicted seconds until the next place is free; None while nothing is known."""
        speed, lefts_s = self._speed, list(self._lefts_s)
        seconds = None if speed is None else speed.place_s(lefts_s)
        return None if seconds is None else bounded(seconds)

    def starts_s(self, queued: Sequence[RequestState], places: int) -> list[float | None]:
        """Predicted seconds until each of these starts, in the order of the queue.

        Args:
            places: requests that could start at once.
        """
        if self._speed is None:
            return [None] * len(queued)
        works_s = [one.queued.left_s if one.queued else self._newest_s for one in queued]
        starts: list[float | None] = []
        starts += self._speed.starts_s(list(self._lefts_s), places, works_s)
        return starts

    def to_json(self) -> dict[str, Any]:
        """For `statistics`."""
        return {"stage": self.stage, "wait_s": self.wait_s}

    @property
    def speed(self) -> float:
        """Seconds of work, alone on the device, that a second of shared forwards does."""
        return 1.0 if self._speed is None else self._speed.speed

    @property
    def wait_s(self) -> float:
        """Predicted seconds until all that is queued now is done."""
        if self._speed is None:
            return 0.0
        unseen = max(0, len(self._queue) - self._seen)
        return self._speed.wait_s(self._waiting_s + unseen * self._newest_s)

    def _update_stage(self) -> tuple[float, float]:
        wait_s, places = self.wait_s, self._max_queue + self._max_running - len(self._lefts_s)
        fill = len(self._queue) / places if places > 0 else 0.0
        pressure = Pressure(wait_s / self._most_s, fill)
        if self.stage or pressure.wait >= ENTER[0] or fill >= ENTER[0]:  # else it stays 0
            self.stage = stage(self.stage, pressure)
        return wait_s, fill
