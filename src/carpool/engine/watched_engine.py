"""An engine as the watch for deadlocks sees it: see `deadlock.Observed`."""

import sys
import threading
from collections.abc import Callable

from carpool.engine.early_answers import EarlyAnswers
from carpool.engine.observe.loop_progress import LoopProgress
from carpool.engine.queue import RequestQueue
from carpool.engine.running import RunningRequests
from carpool.engine.thread_wait import ThreadWait, are_at_work, wait_of


class WatchedEngine:
    """One engine; made on its thread.

    Args:
        answers: to requests that this thread cannot end.
        at_end: is called with the line at which it stands for good.
    """

    def __init__(
        self,
        queue: RequestQueue,
        running: RunningRequests,
        heartbeat: LoopProgress,
        answers: EarlyAnswers,
        at_end: Callable[[str], None],
    ) -> None:
        self._queue, self._running, self._heartbeat = queue, running, heartbeat
        self._answers, self._at_end = answers, at_end
        self._thread = threading.get_ident()
        self._initial_threads = set(sys._current_frames())  # not started by a request

    @property
    def still_s(self) -> float:
        return self._heartbeat.read()[0]

    @property
    def is_closing(self) -> bool:
        return self._queue.is_closed

    @property
    def has_company(self) -> bool:
        fibers = [state.fiber for state in self._running.states]
        return sum(fiber is not None and fiber.is_alive for fiber in fibers) > 1

    def wait(self) -> ThreadWait | None:
        return wait_of(self._thread)

    def are_others_at_work(self) -> bool:
        return are_at_work(self._initial_threads)

    def stands(self) -> None:
        self._answers.due()

    def is_blocked(self, place: str) -> None:
        self._at_end(place)
