"""Answers to requests that the engine's thread cannot end, because it stands in code of users.

Requests that were cancelled or have timed out are answered in time, and all of them where the
thread never goes on. If it does, it ends them once more, of which their listeners hear nothing.
For the thread that watches the engine's.
"""

from collections.abc import Callable
from functools import partial

from carpool.engine.containment import Stages
from carpool.engine.delivery import OffLoop, deliver
from carpool.engine.model.load import LoadedPipeline
from carpool.engine.model.settings_used import SettingsUsed
from carpool.engine.observe.timeline import TimelineStore
from carpool.engine.queue import RequestQueue
from carpool.engine.request import RequestState
from carpool.errors import CarpoolError
from carpool.settings.engine import EngineSettings
from carpool.types import Clock


class EarlyAnswers:
    """Answers the requests of one engine in its place.

    Args:
        running: gives the requests that have begun.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        settings: EngineSettings,
        clock: Clock,
        queue: RequestQueue,
        running: Callable[[], list[RequestState]],
        off_loop: OffLoop,
        timelines: TimelineStore,
        stages: Stages,
    ) -> None:
        self._clock, self._queue, self._running = clock, queue, running
        self._timelines, self._stages = timelines, stages
        used = SettingsUsed(loaded, settings)
        self._deliver = partial(
            deliver, device=loaded.device, settings=used, off_loop=off_loop.finish, stages=stages
        )

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
        now_s = self._clock()
        if is_queued:
            state.status = "finished"
        else:  # it is the engine's to end, if that ever goes on
            self._queue.cancel(state.request_id, error)
        if state.is_answered:
            return
        self._stages.contain("timeline", None, self._timelines.end, state.timeline, error, now_s)
        self._deliver(state, None, error, now_s)
