"""Answers to requests that the engine's thread cannot end, because it stands in code of users.

Requests that were cancelled or have timed out are answered in time, and all of them where the
thread never goes on. If it does, it ends them once more, of which their listeners hear nothing.
For the thread that watches the engine's.
"""

from collections.abc import Callable

from carpool.engine.parts import EngineParts
from carpool.engine.request import RequestState
from carpool.errors import CarpoolError


class EarlyAnswers:
    """Answers the requests of one engine in its place.

    Args:
        running: gives the requests that have begun.
    """

    def __init__(self, parts: EngineParts, running: Callable[[], list[RequestState]]) -> None:
        self._parts, self._queue, self._running = parts, parts.queue, running

    def due(self) -> None:
        """Answer the requests that were cancelled or have timed out."""
        if self._queue.has_ended:
            running = self._running()
            for state, error in self._queue.take_ended(running):
                self._answer(state, error, is_queued=state not in running)

    def all(self, error: CarpoolError) -> None:
        """Answer all requests, queued and running: no other thread will."""
        for state in self._queue.take_all():
            self._answer(state, error, is_queued=True)
        for state in self._running():
            self._answer(state, error, is_queued=False)

    def _answer(self, state: RequestState, error: CarpoolError, *, is_queued: bool) -> None:
        parts, now_s = self._parts, self._parts.clock()
        if is_queued:
            state.status = "finished"
        else:  # it is the engine's to end, if that ever goes on
            self._queue.cancel(state.request_id, error)
        if state.is_answered:
            return
        end = parts.timelines.end
        parts.stages.contain("timeline", None, end, state.timeline, error, now_s)
        parts.deliver(state, None, error, now_s)
