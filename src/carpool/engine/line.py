"""The bounded line in which requests wait to be admitted, and where any thread may reach the loop.

Everything here may be called from any thread. The engine's own thread takes requests out, asks
which of those it has it should give up, and sleeps here while there is nothing to do.
"""

import threading
from collections import deque
from collections.abc import Iterable
from math import inf

from carpool.engine.rider import Listener, Rider
from carpool.errors import Cancelled, CarpoolError, DeadlineExceeded, Draining, Overloaded
from carpool.types import Clock, Event, Job


class Line:
    """Requests that wait, and those that somebody gave up."""

    def __init__(self, max_waiting: int, clock: Clock) -> None:
        self._max_waiting, self._clock = max_waiting, clock
        self._changed = threading.Condition()
        self._waiting: deque[Rider] = deque()
        self._cancelled: dict[str, CarpoolError] = {}
        self._next_due_s = inf  # no deadline, waiting or running, is earlier
        self._pace = _Pace()
        self.admitted = 0  # requests ever put into the line
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, job: Job, listener: Listener, *, free_places: int) -> None:
        """Let a request wait.

        Args:
            job: checked.
            listener: hears of everything that happens to it, `queued` first.
            free_places: requests that could be admitted at once, so that they do not count.

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
                    retry_after_s=self._pace.next_s(now_s),
                )
            self.admitted += 1
            rider = Rider(job, listener, self.admitted, now_s)
            listener.event(Event("queued", job.request_id, now_s))
            self._waiting.append(rider)
            self._next_due_s = min(self._next_due_s, rider.due_s)
            self._changed.notify()

    def take(self) -> Rider | None:
        """The request that waits longest, if any."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

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
            self._next_due_s = min((rider.due_s for rider in wanted), default=inf)
        return unwanted

    def ended(self) -> None:
        """Note that a request ended, for the next retry hint."""
        self._pace.ended(self._clock())

    def wait(self) -> None:
        """Sleep until there is something to take, to give up, or the line is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._cancelled or self.is_closed)

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
