"""Running requests: start them, resume their fibers, park their calls, end them.

Whatever a pipeline raises ends its own request only. For the engine's thread.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from carpool.config import EngineSettings
from carpool.engine.admission import AdmissionControl
from carpool.engine.delivery import OffLoop, deliver
from carpool.engine.describe import Describer
from carpool.engine.execute import Failure
from carpool.engine.fiber import Raised, Returned
from carpool.engine.foreign_code import runs_foreign_code
from carpool.engine.installation import Installation
from carpool.engine.intercept import Call
from carpool.engine.journal import Identity, Mismatch
from carpool.engine.model.load import LoadedPipeline
from carpool.engine.model.preview import PreviewSender
from carpool.engine.model.settings_used import SettingsUsed
from carpool.engine.model.view import call, view
from carpool.engine.observe.loop_progress import LoopProgress
from carpool.engine.observe.no_effect import EffectObserver
from carpool.engine.observe.stats import Stats
from carpool.engine.observe.timeline import TimelineStore
from carpool.engine.pipeline_errors import causes, to_api_error
from carpool.engine.pixel_limit import PixelLimit
from carpool.engine.queue import RequestQueue
from carpool.engine.request import FiberState, RequestState
from carpool.engine.step_cache import StepCache
from carpool.engine.tokenizers import HostCall
from carpool.errors import CarpoolError, Released
from carpool.request.sizes import rounded_size
from carpool.types import Clock, Event

log = logging.getLogger("carpool")

MOST_REPLAYS = 64  # that are known until somebody asks
CHECK_WEIGHTS_EVERY_S = 1.0  # while requests run: each check looks at every weight


@dataclass(frozen=True, slots=True)
class JournalReplay:
    """A request was brought to where it was by its journal."""

    request_id: str
    steps: int  # that were not made again
    took_s: float  # from its start
    ended_s: float  # engine clock


class RunningRequests:
    """The requests between their start and their end."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        settings: EngineSettings,
        clock: Clock,
        queue: RequestQueue,
        installation: Installation,
        describer: Describer,
        admission: AdmissionControl,
        off_loop: OffLoop,
        heartbeat: LoopProgress,
        stats: Stats,
        timelines: TimelineStore,
    ) -> None:
        self._loaded, self._clock, self._queue = loaded, clock, queue
        self._isolation = installation.isolation
        self._describer, self._off_loop = describer, off_loop
        self._heartbeat, self._stats, self._timelines = heartbeat, stats, timelines
        self._previews = PreviewSender(
            loaded.pipe, loaded.device, clock, off_loop.finish,
            is_overloaded=lambda: admission.stage > 0,
        )  # fmt: skip
        # of what journals are about
        self._adapters = installation.adapters
        self._identity = Identity(loaded, self._adapters.identity)
        self._settings = SettingsUsed(loaded, settings)
        self._step_cache = settings.step_cache  # of requests that do not say it
        self._states: dict[int, RequestState] = {}  # by number
        self._checked_s = -inf  # when weights were looked at
        self._calls = 0  # that ever parked
        self.fiber_s = 0.0  # spent in the pipelines' own code, in this turn
        self.longest_s = 0.0  # of those, in one go
        self.replays: deque[JournalReplay] = deque(maxlen=MOST_REPLAYS)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def states(self) -> list[RequestState]:
        """All of them. From any thread."""
        return list(self._states.values())

    def steps_left(self) -> dict[str, float]:
        """Denoising steps that requests have left, as far as their number is known. From any
        thread."""
        return {one.request_id: float(one.steps - one.step) for one in self.states if one.steps}

    def take_replays(self) -> list[tuple[JournalReplay, float]]:
        """Requests that were replayed from journals since the last time, and how long ago. From
        any thread."""
        now_s = self._clock()
        taken = [self.replays.popleft() for _ in range(len(self.replays))]
        return [(one, now_s - one.ended_s) for one in taken]

    @property
    def parked(self) -> list[RequestState]:
        """The requests that wait for a forward."""
        return [state for state in self._states.values() if state.is_parked]

    def start(self, state: RequestState) -> None:
        """Start the pipeline of a request that was queued."""
        now_s, request = self._clock(), state.request
        self._states[state.number] = state
        self._stats.start(now_s - state.submitted_s)
        state.listener.event(Event("started", request.request_id, now_s))
        self._begin(state, now_s)

    def _begin(self, state: RequestState, now_s: float) -> None:
        """Run a request's pipeline from its beginning."""
        request = state.request
        if state.journal is not None:
            state.journal.begin(self._identity, request)
        mine = view(self._loaded, request.task)
        task = self._loaded.card.task(request.task)
        state.pixel_limit = PixelLimit(mine, self._loaded.card, task)
        state.preview_hook = self._previews.hook(mine, request, state.listener.event)
        threshold = self._step_cache if request.step_cache is None else request.step_cache
        state.step_cache = StepCache(threshold) if threshold else None
        is_watched = runs_foreign_code(mine, request.arguments)
        context = self._isolation.context(request.seed, is_watched=is_watched)
        context.request_id, context.warnings = request.request_id, state.warnings
        state.effects = effects = EffectObserver(self._loaded.card, task, request.arguments)
        context.names, context.note_texts = effects.given.keys(), effects.tokenizes
        if (told := rounded_size(self._loaded.card, task, request.arguments)) is not None:
            state.warnings.append(told)
        state.warnings += self._adapters.warnings(request.lora)
        state.start(mine, context, partial(call, mine, request, self._loaded.card), now_s)
        self._resume(state)

    def resume(self, answered: Iterable[tuple[RequestState, Any]]) -> None:
        """Give requests the answers, or `Failure`s, that they wait for; ended ones get none."""
        for state, answer in answered:
            if state.status == "running":
                self._resume(state, answer)

    def end_cancelled(self) -> None:
        """End the requests, running or queued, that were cancelled or have timed out."""
        if self._queue.has_ended:
            for state, error in self._queue.take_ended(self._states.values()):
                self._end(state, None, error)

    def take_news(self) -> bool:
        """Do what other threads ask for: end requests, and resume those with results from there.

        Given up are those that another engine is to go on with.

        Returns:
            Whether there were results.
        """
        if not self._queue.has_news:
            return False  # the usual case
        self.end_cancelled()
        for state in self._queue.take_released(self.states):
            state.timeline.is_moved = True
            self._end(state, None, Released("another engine goes on with it"))
        results = self._queue.take_host_results()
        self.resume(results)
        return bool(results)

    def end_all(self, error: CarpoolError) -> None:
        """End all requests, running or queued."""
        for state in [*self._queue.take_all(), *self.states]:
            self._end(state, None, error)

    def _resume(self, state: RequestState, answer: Any = None) -> None:
        """Run a request's pipeline until it waits for a forward, or ends."""
        if state.is_parked and not isinstance(answer, Failure):
            if state.journal is not None:
                state.journal.ran(state.call, answer)
            if state.step_cache is not None:
                state.step_cache.ran(state.call, answer)
        journal = state.journal
        was_replaying = journal is not None and journal.is_replaying
        while (answer := self._advance(state, answer)) is not None:
            pass  # a call that needs no forward: the step is skipped, or was made before
        if was_replaying and journal is not None and journal.replayed and not journal.is_replaying:
            now_s, began_s = self._clock(), state.timeline.started_s
            self.replays.append(JournalReplay(state.request_id, state.step, now_s - began_s, now_s))

    def _advance(self, state: RequestState, answer: Any) -> Any | None:
        """Run a request's pipeline until its next call or its end, and act on that.

        Returns:
            The answer of a call that the request's own cache answers.
        """
        began_s, failed_forward = self._clock(), None
        self._heartbeat.beat()
        if isinstance(answer, Failure):
            failed_forward = answer.error if state.is_parked else None
            came: FiberState = state.resume(error=answer.error)
        else:
            came = state.resume(answer)
        now_s = self._clock()
        self.fiber_s += now_s - began_s
        self.longest_s = max(self.longest_s, now_s - began_s)
        if state.context is not None and state.context.overlay.changed:
            state.timeline.exclusive = self._isolation.exclusive(state.context)
        if isinstance(came, Call):
            return self._park(state, came, now_s)
        if isinstance(came, HostCall):
            self._off_loop.host(partial(self._run_on_host, state, came))
        elif isinstance(came, Returned):
            if state.timeline.reached(state.steps):
                self._tell_step(state, now_s)
            if state.effects is not None:
                _follow(state, partial(_warn, state, state.effects))
            self._end(state, came.value, None)
        else:
            assert isinstance(came, Raised)
            if isinstance(came.error, Exception):
                self._loaded.device.check(came.error)
            self._end(state, None, self._error_of(state, came.error, failed_forward))
        return None

    def _error_of(
        self, state: RequestState, error: BaseException, failed_forward: BaseException | None
    ) -> Exception:
        """The API error for an exception that left a pipeline.

        Args:
            failed_forward: raised in its call just before.
        """
        is_own = all(cause is not failed_forward for cause in causes(error))
        is_early = state.denoiser_calls == 0 and is_own
        defaults = self._loaded.card.defaults
        given = state.request.arguments.items()
        names = [name for name, value in given if name not in defaults or value != defaults[name]]
        return to_api_error(error, is_early=is_early, arguments=names)

    def _park(self, state: RequestState, parked: Call, now_s: float) -> Any | None:
        try:
            if state.pixel_limit is not None:
                state.pixel_limit.check(parked)
        except Exception as error:  # above the limit; or a shape that cannot be measured
            return Failure(error)
        if parked.target.phase == "denoise" and state.effects is not None:
            _follow(state, partial(state.effects.denoises, state.view, parked))
        self._calls += 1
        parked, key, rows = self._describer.describe(parked, state.request, state.descriptions)
        if state.park(parked, key, rows, self._calls, now_s):
            self._tell_step(state, now_s)
        if (cache := state.step_cache) is not None:
            answer = cache.answer(parked, state.step, state.steps)
            if cache.skipped_steps > state.timeline.skipped_steps:
                state.timeline.skipped_steps = cache.skipped_steps
                self._stats.skip()
            if answer is not None:
                if state.journal is not None:
                    state.journal.skip()
                return answer
        if state.journal is not None:
            try:
                answer = state.journal.answer(parked)
            except Mismatch as mismatch:
                self._start_over(state, mismatch, now_s)
                return None
            if answer is not None:
                state.timeline.replayed_calls += 1
                if cache is not None:
                    cache.ran(parked, answer)
                return answer
        module = parked.target.component, parked.target.method
        self._timelines.parked(state.timeline, module, key, now_s)
        return None

    def _start_over(self, state: RequestState, mismatch: Mismatch, now_s: float) -> None:
        """Run a request from its beginning whose journal is not its own."""
        log.warning(
            "request %s starts over, its journal does not match: %s", state.request_id, mismatch
        )
        assert state.journal is not None
        state.journal.drop()
        state.rewind()
        state.listener.event(Event("step", state.request_id, now_s))
        self._begin(state, now_s)

    def _run_on_host(self, state: RequestState, work: HostCall) -> None:
        try:
            result = work.run()
        except Exception as error:
            result = Failure(error)
        self._queue.put_host_result(state, result)

    def _tell_step(self, state: RequestState, now_s: float) -> None:
        if state.journal is not None and state.journal.is_replaying:
            return  # it was told before
        self._stats.step(now_s)
        event = Event("step", state.request_id, now_s, state.step, state.steps)
        state.listener.event(event)

    def _end(self, state: RequestState, output: Any, error: Exception | None) -> None:
        """Finish a request, keep nothing of it, and deliver its outcome."""
        now_s = self._clock()
        self._states.pop(state.number, None)
        self._queue.note_completion()
        state.finish()
        if not self._states or now_s - self._checked_s >= CHECK_WEIGHTS_EVERY_S:
            self._checked_s = now_s
            self._isolation.check_weights(state.request_id)
        self._timelines.end(state.timeline, error, now_s)
        if now_s > state.deadline_at_s:
            self._stats.late()
        deliver(
            state, output, error, now_s, self._loaded.device, self._settings, self._off_loop.finish
        )


def _follow(state: RequestState, work: Callable[[], None]) -> None:
    """Follow what becomes of a request's arguments; its output does not depend on that."""
    try:
        work()
    except Exception:  # such as of a property of a pipeline of one's own
        log.exception("request %s: its arguments cannot be followed", state.request_id)
        state.effects = None


def _warn(state: RequestState, effects: EffectObserver) -> None:
    """Add the arguments that had no effect to the warnings of a request that has ended."""
    for name, reason in effects.reasons(state.view):
        if any(name in re.findall(r"\w+", warning) for warning in state.warnings):
            continue  # diffusers has said it
        state.warnings.append(f"{name} had no effect: {reason}")
        log.warning("request %s: %s", state.request_id, state.warnings[-1])
