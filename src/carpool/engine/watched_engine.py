"""The deadlock watchdog's view of an engine, and answers that the engine's thread cannot give.

While the engine's thread stands in user code, this answers cancelled and timed-out requests; once
that thread is stuck for good, it answers all requests. If the thread continues after all, it ends
them again, without a second answer to their listeners. For the watchdog's thread.
"""

import sys
import threading
from collections.abc import Callable

from carpool.engine.parts import EngineParts
from carpool.engine.request import RequestState
from carpool.engine.running import RunningRequests
from carpool.engine.thread_wait import ThreadWait, are_at_work, wait_of
from carpool.errors import CarpoolError


class WatchedEngine:
    """One engine.

    Args:
        at_end: called with the line where its thread is stuck for good.
    """

    def __init__(
        self, parts: EngineParts, running: RunningRequests, at_end: Callable[[str], None]
    ) -> None:
        self._parts, self._queue, self._running = parts, parts.queue, running
        self.is_blocked, self._thread = at_end, 0
        self._initial_threads = set[int]()  # threads not started by a request

    def begin(self) -> "WatchedEngine":
        """Record its thread, which calls this; returns the engine."""
        self._thread, self._initial_threads = threading.get_ident(), set(sys._current_frames())
        return self

    @property
    def still_s(self) -> float:
        """Seconds since the loop last made progress; 0 while it is idle."""
        return self._parts.heartbeat.read()[0]

    @property
    def is_closing(self) -> bool:
        return self._queue.is_closed

    @property
    def has_company(self) -> bool:
        """Whether more than one request is in progress."""
        fibers = [state.fiber for state in self._running.states]
        return sum(fiber is not None and fiber.is_alive for fiber in fibers) > 1

    def wait(self) -> ThreadWait | None:
        """Where its thread stands in user code; None: it does not."""
        return wait_of(self._thread)

    def are_others_at_work(self) -> bool:
        """Whether a thread that user code may have started is at work, not waiting."""
        return are_at_work(self._initial_threads)

    def stands(self) -> None:
        """Handle a thread that stands in user code: answer cancelled and timed-out requests."""
        if self._queue.has_ended:
            running = self._running.states
            for state, error in self._queue.take_ended(running):
                self._answer(state, error, is_queued=state not in running)

    def answer_all(self, error: CarpoolError) -> None:
        """Answer all requests, queued and running, of a thread that is given up.

        Switches and random numbers of the process are restored now: if that thread ever continues,
        others have set them since.
        """
        for state in self._queue.take_all():
            self._answer(state, error, is_queued=True)
        for state in self._running.states:
            if state.context is not None:
                self._parts.stages.contain("unwind", None, state.context.abandon)
            self._answer(state, error, is_queued=False)

    def _answer(self, state: RequestState, error: CarpoolError, *, is_queued: bool) -> None:
        parts, now_s = self._parts, self._parts.clock()
        if is_queued:
            state.status = "finished"
        else:  # the engine's thread ends it, if it ever continues
            self._queue.cancel(state.request_id, error)
        if state.is_answered:
            return
        parts.stages.contain("timeline", None, parts.timelines.end, state.timeline, error, now_s)
        parts.deliver(state, None, error, now_s)
