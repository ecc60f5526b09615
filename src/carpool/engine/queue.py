"""The bounded line in which requests wait to be admitted, and where any thread may reach the loop.

Everything here may be called from any thread. The engine's own thread takes requests out, asks
which of those it has it should give up, and sleeps here while there is nothing to do.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable
from math import inf
from typing import Any

from carpool.engine.observe.timeline import Lives
from carpool.engine.request import Listener, Rider
from carpool.errors import Cancelled, CarpoolError, DeadlineExceeded, Draining, Overloaded
from carpool.types import CheckedRequest, Clock, Event


class Line:
    """Requests that wait, and those that somebody gave up."""

    def __init__(self, max_waiting: int, clock: Clock, lives: Lives) -> None:
        self._max_waiting, self._clock, self._lives = max_waiting, clock, lives
        self._changed = threading.Condition()
        self._waiting: deque[Rider] = deque()
        self._cancelled: dict[str, CarpoolError] = {}
        self._answers: list[tuple[Rider, Any]] = []  # of calls that needed no forward
        self._next_due_s = inf  # no deadline, waiting or running, is earlier
        self._pace = _Pace()
        self.admitted = 0  # requests ever put into the line
        self.is_closed = False
        self._version = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self,
        job: CheckedRequest,
        listener: Listener,
        *,
        free_places: int,
        place_s: float | None = None,
    ) -> None:
        """Let a request wait.

        Args:
            job: checked.
            listener: hears of everything that happens to it, `queued` first.
            free_places: requests that could be admitted at once, so that they do not count.
            place_s: when a place is likely to be free, by what forwards take; None: not known.

        Raises:
            Overloaded: too many wait; `retry_after_s` says when a place is likely to be free.
            Draining: the line is closed.
        """
        now_s = self._clock()
        with self._changed:
            if self.is_closed:
                raise Draining("the engine is closing and takes no new requests")
            if len(self._waiting) >= self._max_waiting + free_places:
                raise Overloaded(
                    f"the queue is full: {len(self._waiting)} requests wait, the most is "
                    f"{self._max_waiting}",
                    retry_after_s=self._pace.next_s(now_s) if place_s is None else place_s,
                )
            self.admitted += 1
            life = self._lives.begin(job.request_id, now_s)
            rider = Rider(job, listener, self.admitted, life)
            listener.event(Event("queued", job.request_id, now_s))
            self._waiting.append(rider)
            self._version += 1
            self._next_due_s = min(self._next_due_s, rider.due_s)
            self._changed.notify()

    def waiting(self, since: int) -> tuple[int, list[Rider] | None]:
        """The line, those who wait longest first, and its version; None if it is that of `since`.

        Versions count up with every change.
        """
        with self._changed:
            return self._version, None if since == self._version else list(self._waiting)

    def take(self, numbers: Collection[int]) -> list[Rider]:
        """Take requests out, in the order of the line."""
        with self._changed:
            taken = [rider for rider in self._waiting if rider.number in numbers]
            self._waiting = deque(r for r in self._waiting if r.number not in numbers)
            self._version += 1
        return taken

    def take_all(self) -> list[Rider]:
        """Take out whoever is left."""
        with self._changed:
            taken, self._waiting = list(self._waiting), deque()
            self._version += 1
        return taken

    def cancel(self, request_id: str, error: CarpoolError | None = None) -> None:
        """Give a request up, waiting or running. Ids that are not known do nothing."""
        with self._changed:
            self._cancelled[request_id] = error or Cancelled("the request was cancelled")
            self._changed.notify()

    def unwanted(self, running: Iterable[Rider]) -> list[tuple[Rider, CarpoolError]]:
        """Requests that were cancelled or whose time is up; the waiting ones leave the line."""
        now_s = self._clock()
        if not self._cancelled and now_s < self._next_due_s:
            return []  # the usual case, asked twice a turn
        with self._changed:
            cancelled, self._cancelled = self._cancelled, {}
            unwanted, wanted = [], []
            for rider in [*self._waiting, *running]:
                error = cancelled.get(rider.job.request_id)
                if error is None and rider.due_s <= now_s:
                    late = f"timeout_s={rider.job.timeout_s} ran out after {rider.step} steps"
                    error = DeadlineExceeded(late)
                if error is None:
                    wanted.append(rider)
                else:
                    unwanted.append((rider, error))
            self._waiting = deque(rider for rider in wanted if rider.fiber is None)
            self._version += 1
            self._next_due_s = min((rider.due_s for rider in wanted), default=inf)
        return unwanted

    def answer(self, rider: Rider, answer: Any) -> None:
        """Hand over what a request that runs got from another thread."""
        with self._changed:
            self._answers.append((rider, answer))
            self._changed.notify()

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def answered(self) -> list[tuple[Rider, Any]]:
        """Take what was handed over since the last time."""
        if not self._answers:
            return []  # the usual case
        with self._changed:
            answers, self._answers = self._answers, []
        return answers

    def ended(self) -> None:
        """Note that a request ended, for the next retry hint."""
        self._pace.ended(self._clock())

    def wait(self, since: int, wake_s: float) -> None:
        """Sleep until the line is no longer that of version `since`, or a moment has come.

        Args:
            wake_s: on the line's clock; a deadline in the line wakes, too.
        """
        with self._changed:
            left_s = min(wake_s, self._next_due_s) - self._clock()
            self._changed.wait_for(
                lambda: (
                    self._version != since or self._cancelled or self._answers or self.is_closed
                ),
                None if left_s == inf else max(0.0, left_s),
            )

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify()


class _Pace:
    """How fast requests end: the honest answer to "when may I come again?"."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._gap_s = 1.0  # moving mean

    def ended(self, now_s: float) -> None:
        if self._last_s is not None:
            self._gap_s += 0.2 * (now_s - self._last_s - self._gap_s)
        self._last_s = now_s

    def next_s(self, now_s: float) -> float:
        waited_s = 0.0 if self._last_s is None else now_s - self._last_s
        return min(max(self._gap_s - waited_s, 0.1), 120.0)  # SDKs ignore hints above two minutes
