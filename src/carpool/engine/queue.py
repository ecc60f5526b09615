"""The bounded request queue, and the only way for other threads to reach the engine's.

Any thread may call anything here. The engine's thread takes requests and results out, asks which
requests must end, and sleeps here while idle.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from math import inf
from typing import Any

from carpool.engine.journal import Journal
from carpool.engine.observe.timeline import TimelineStore
from carpool.engine.request import Listener, RequestState
from carpool.errors import Cancelled, CarpoolError, DeadlineExceeded, Draining, Overloaded
from carpool.types import CheckedRequest, Clock, Event

RETRY_AFTER_S = 1.0  # while nothing is predicted; half: clients ask in vain more often


class RequestQueue:
    """Queued requests; cancellations and results of host calls for running ones."""

    def __init__(self, max_waiting: int, clock: Clock, timelines: TimelineStore) -> None:
        self._max_waiting, self._clock, self._timelines = max_waiting, clock, timelines
        self._changed = threading.Condition()
        self._waiting: deque[RequestState] = deque()
        self._cancelled: dict[str, CarpoolError] = {}
        self._released: set[str] = set()
        self._host_results: list[tuple[RequestState, Any]] = []
        self._next_timeout_s = inf  # earliest timeout of queued and running requests
        self._closing_error: CarpoolError | None = None  # why the queue takes no requests any more
        self.submitted = 0  # requests ever put into the queue
        self.is_closed = False
        self.version = 0  # counts the changes of the queue

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self,
        request: CheckedRequest,
        listener: Listener,
        *,
        free_places: int,
        place_s: float | None = None,
        waited_s: float = 0.0,
        journal: Journal | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request: checked.
            listener: receives its events, `queued` first.
            free_places: requests that could run at once, which do not count towards the limit.
            place_s: predicted seconds until the next place is free; None: unknown.
            waited_s: seconds it waited elsewhere before.
            journal: holds an earlier run of it, or is empty.

        Raises:
            Overloaded: the queue is full; `retry_after_s` says when a place is likely to be free.
            Draining: the queue is closed.
            CarpoolError: the error with which the queue was closed.
        """
        now_s = self._clock()
        with self._changed:
            if self._closing_error is not None:
                raise self._closing_error
            if self.is_closed:
                raise Draining("the engine is closing and takes no new requests")
            if len(self._waiting) >= self._max_waiting + free_places:
                raise Overloaded(
                    f"the queue is full: {len(self._waiting)} requests wait, the limit is "
                    f"{self._max_waiting}",
                    retry_after_s=RETRY_AFTER_S if place_s is None else place_s,
                )
            self.submitted += 1
            timeline = self._timelines.begin(request.request_id, now_s - waited_s, self.submitted)
            state = RequestState(request, listener, self.submitted, timeline, journal=journal)
            listener.event(Event("queued", request.request_id, now_s))
            self._waiting.append(state)
            self.version += 1
            self._next_timeout_s = min(self._next_timeout_s, state.timeout_at_s)
            self._changed.notify()

    def together(self) -> AbstractContextManager[object]:
        """Make the requests put inside this `with` visible to the engine's thread at once.

        So the requests of one list are admitted, and encoded, together. Code inside must not wait
        for the engine.
        """
        return self._changed  # a reentrant lock

    def snapshot(self) -> tuple[int, list[RequestState]]:
        """The queue's version, and its requests, oldest first."""
        with self._changed:
            return self.version, list(self._waiting)

    def take(self, numbers: Collection[int]) -> list[RequestState]:
        """Take requests out, in the order of the queue."""
        with self._changed:
            removed = [state for state in self._waiting if state.number in numbers]
            self._waiting = deque(s for s in self._waiting if s.number not in numbers)
            self.version += 1
        return removed

    def take_all(self) -> list[RequestState]:
        """Take all requests out."""
        with self._changed:
            removed, self._waiting = list(self._waiting), deque()
            self.version += 1
        return removed

    def cancel(self, request_id: str, error: CarpoolError | None = None) -> None:
        """Ask the engine to end a request, queued or running. Unknown ids are ignored."""
        with self._changed:
            self._cancelled[request_id] = error or Cancelled("the request was cancelled")
            self._changed.notify()

    def release(self, request_id: str) -> None:
        """Ask the engine to give up a request, if another engine can continue it."""
        with self._changed:
            self._released.add(request_id)
            self._changed.notify()

    @property
    def has_ended(self) -> bool:
        """Whether a request was cancelled or has timed out. Cheap: read twice a turn."""
        return bool(self._cancelled) or self._clock() >= self._next_timeout_s

    @property
    def has_news(self) -> bool:
        """Whether a request has ended or was released, or a host call has a result."""
        if self._released or self._host_results or self._cancelled:
            return True
        return self._clock() >= self._next_timeout_s

    def take_released(self, running: Iterable[RequestState]) -> list[RequestState]:
        """Released requests that lose at most one step; drops the other releases."""
        with self._changed:
            names, self._released = self._released, set()
            waiting = [state for state in self._waiting if state.request_id in names]
            self._waiting = deque(state for state in self._waiting if state.request_id not in names)
            self.version += 1
        return waiting + [
            state
            for state in running
            if state.request_id in names and state.journal is not None and state.journal.is_whole
        ]

    def take_ended(
        self, running: Iterable[RequestState]
    ) -> list[tuple[RequestState, CarpoolError]]:
        """Requests that were cancelled or have timed out; the queued ones leave the queue."""
        now_s = self._clock()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, {}
            ended, remaining = [], []
            waiting = set(self._waiting)
            for state in [*self._waiting, *running]:
                error = cancelled.get(state.request_id)
                if error is None and state.timeout_at_s <= now_s:
                    late = f"timeout_s={state.request.timeout_s} ran out after"
                    error = DeadlineExceeded(f"{late} {state.timeline.step} steps")
                if error is None:
                    remaining.append(state)
                else:
                    ended.append((state, error))
            self._waiting = deque(state for state in remaining if state in waiting)
            self.version += 1
            self._next_timeout_s = min((state.timeout_at_s for state in remaining), default=inf)
        return ended

    def put_host_result(self, state: RequestState, result: Any) -> None:
        """Hand over the result of a running request's host call."""
        with self._changed:
            self._host_results.append((state, result))
            self._changed.notify()

    def take_host_results(self) -> list[tuple[RequestState, Any]]:
        """Take the results handed over since the last call."""
        with self._changed:
            results, self._host_results = self._host_results, []
        return results

    def wait(self, since: int, wake_s: float) -> None:
        """Sleep until the queue's version is no longer `since`, or until a time.

        Args:
            wake_s: on the queue's clock; a request's timeout wakes it earlier.
        """
        with self._changed:
            left_s = min(wake_s, self._next_timeout_s) - self._clock()
            self._changed.wait_for(
                lambda: self.version != since or self.is_closed or self.has_news,
                min(max(0.0, left_s), 3600.0),  # threading refuses centuries
            )

    def close(self, error: CarpoolError | None = None) -> None:
        """Take no more requests.

        Args:
            error: raised for later requests.
        """
        with self._changed:
            self._closing_error = self._closing_error or error
            self.is_closed = True
            self._changed.notify()
