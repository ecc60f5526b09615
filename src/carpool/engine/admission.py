"""Lets requests into the line while the work that waits is bearable, and says how bearable it is.

The engine's thread tells at every turn what waits and who is aboard, and what forwards take;
`check` and the rest may be asked from any thread: they read single numbers.
"""

from collections.abc import Sequence
from typing import Any

from carpool.config import EngineSettings
from carpool.engine.queue import Line
from carpool.errors import Overloaded
from carpool.schedule.overload import Pressure, Speed, again_s, bounded, refuses, stage


class Gate:
    """The overload stage of one engine: see `carpool.schedule.overload`."""

    def __init__(self, line: Line, settings: EngineSettings) -> None:
        self._line, self._most_s = line, settings.max_wait
        self._max_queue, self._max_running = settings.max_queue, settings.max_running
        self._speed: Speed | None = None  # until predictions are proven
        self._seen, self._waiting_s = 0, 0.0  # of the line
        self._newest_s = 0.0  # work of the youngest request: a guess for those not looked at yet
        self._aboard = 0
        self._place_s: float | None = None
        self.stage = 0

    @property
    def is_informed(self) -> bool:
        """Whether it has learned anything."""
        return self._speed is not None

    def learn(self, alone_s: float, calls: int, together_s: float) -> None:
        """A forward of several calls took so long, and one after another they would `alone_s`."""
        self._speed = self._speed or Speed()
        self._speed.learn(alone_s, calls, together_s)

    def look(self, waiting: int, waiting_s: float, lefts_s: Sequence[float]) -> None:
        """How many wait, with how much predicted work, and how much those aboard have left."""
        self._seen, self._waiting_s = waiting, waiting_s
        self._aboard = len(lefts_s)
        self._place_s = self._speed.place_s(list(lefts_s)) if self._speed else None
        self._turn()

    def check(self, priority: int, whole_s: float) -> None:
        """Refuse a new request if its priority is too low for what is going on.

        Args:
            whole_s: its predicted work, seconds alone on the device.

        Raises:
            Overloaded: with when the wait will be short enough.
        """
        self._newest_s = whole_s
        wait_s, fill = self._turn()
        if refuses(self.stage, priority) and fill < 1:  # the line speaks for itself when it is full
            which = "no new one" if self.stage == 3 else "none of priority below 0"
            raise Overloaded(
                f"the server is overloaded: {len(self._line)} requests wait, with work for some "
                f"{wait_s:.3g} s (the most is {self._most_s:g} s, --max-wait): {which} is taken",
                retry_after_s=max(again_s(self.stage, wait_s, self._most_s), self.place_s or 0.0),
            )

    @property
    def place_s(self) -> float | None:
        """When the next place is likely to be free; None while nothing is known of that."""
        return None if self._place_s is None else bounded(self._place_s)

    def to_json(self) -> dict[str, Any]:
        """For `statistics`."""
        return {"stage": self.stage, "wait_s": self._wait_s()}

    def _wait_s(self) -> float:
        if self._speed is None:
            return 0.0
        unseen = max(0, len(self._line) - self._seen)
        return self._speed.wait_s(self._waiting_s + unseen * self._newest_s)

    def _turn(self) -> tuple[float, float]:
        wait_s, places = self._wait_s(), self._max_queue + self._max_running - self._aboard
        fill = len(self._line) / places if places > 0 else 0.0
        self.stage = stage(self.stage, Pressure(wait_s / self._most_s, fill))
        return wait_s, fill
