"""Running requests: start them, resume their fibers, park their calls, end them.

An exception of a pipeline, or of work done for one request, ends that request only. For the
engine's thread.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from carpool.engine.answers import AnswerList, StartOver
from carpool.engine.containment import UNCONTAINED, EngineLost, RequestStage
from carpool.engine.describe import Describer
from carpool.engine.execute import Failure
from carpool.engine.fiber import Raised, Returned
from carpool.engine.foreign_code import runs_foreign_code
from carpool.engine.intercept import Call
from carpool.engine.isolation import RequestContext
from carpool.engine.model.preview import PreviewSender
from carpool.engine.model.samplers import exchanged
from carpool.engine.model.text_pipeline import TextPipeline
from carpool.engine.model.view import call, view
from carpool.engine.observe.no_effect import unread_parameters
from carpool.engine.parts import EngineParts
from carpool.engine.pipeline_errors import error_of, to_api_error
from carpool.engine.private_ride import PrivateContext
from carpool.engine.request import FiberState, RequestState, RideContext
from carpool.engine.ride_choice import RideChoice, SecondRuns
from carpool.engine.scheduler import Scheduler
from carpool.engine.tokenizers import HostCall, run_on_host
from carpool.errors import Cancelled, CarpoolError, Released
from carpool.schedule.views import ParkedCall
from carpool.types import Event

log = logging.getLogger("carpool")

PROMPT_EVERY_S = 0.2  # half: twice as many messages; twice: the text visibly jumps


class RunningRequests:
    """The requests that have started and not ended."""

    def __init__(self, parts: EngineParts, describer: Describer, scheduler: Scheduler) -> None:
        loaded, clock, stages = parts.loaded, parts.clock, parts.stages
        self._loaded, self._clock, self._stages = loaded, clock, stages
        self._isolation, self._adapters = parts.installation.isolation, parts.adapters
        self._describer, self._queue, self._off_loop = describer, parts.queue, parts.off_loop
        self._heartbeat, self._stats = parts.heartbeat, parts.stats
        self._timelines, self._deliver_outcome = parts.timelines, parts.deliver
        self._previews = PreviewSender(
            loaded.pipe, loaded.device, clock, parts.off_loop.finish,
            is_overloaded=lambda: scheduler.admission.stage > 0, stages=stages,
        )  # fmt: skip
        self._scheduler, self._is_exact = scheduler, parts.settings.numerics == "exact"
        self.answers = AnswerList(parts)
        self.rides, self._second_runs = RideChoice(loaded, parts.settings.isolation), SecondRuns()
        self.by_number: dict[int, RequestState] = {}  # keyed by request number
        self.private: RequestState | None = None  # the request that runs alone in the engine
        self._next: RequestState | None = None  # starts after all others have ended; blocks others
        self.postponed: list[Callable[[], None]] = []  # runs after the private ride, or a step
        self.is_step_due = False  # starts have taken as long this turn as a step of those that draw
        self._calls = 0  # calls parked so far
        self.fiber_s = self.longest_s = 0.0  # in the pipelines' code this turn; longest stretch
        self.have_advanced = False  # whether a pipeline's code has run this turn

    @property
    def states(self) -> list[RequestState]:
        """All running requests. From any thread."""
        return list(self.by_number.values())

    @property
    def parked(self) -> list[RequestState]:
        """The requests that wait for a forward; those that draw, if starts have delayed them."""
        states = self.by_number.values() if self.private is None else [self.private]
        parked = [state for state in states if state.is_parked]
        if self.is_step_due and (self.postponed or self.fiber_s > self.longest_s):
            parked = [state for state in parked if state.timeline.phase == "denoise"]
        return parked

    def prepare(self) -> None:
        """Do in advance what the first request of each pipeline would wait for."""
        self.rides.walk()
        for task in self._loaded.originals:
            cls: type = type(view(self._loaded, task))
            unread_parameters(cls)

    def admit(self, states: Iterable[RequestState]) -> None:
        """Add requests that have left the queue, before the first of them starts."""
        if not self.by_number:
            have_changed = self._stages.contain("cache", True, self.answers.shared.have_changed)
            if self._isolation.note_weights() or have_changed:
                self._isolation.note_modules()
                self.answers.shared.clear()
        self.by_number.update((state.number, state) for state in states)
        for state in self.by_number.values() if len(self.by_number) > 1 else ():
            state.has_company = True

    def start(self, state: RequestState) -> None:
        """Start the pipeline of a queued request."""
        now_s = self._clock()
        self._stages.contain("count", None, self._stats.start, now_s - state.submitted_s)
        self._tell(state, Event("started", state.request_id, now_s))
        self._start_if_due(state)

    def _start_if_due(self, state: RequestState) -> None:
        if state.has_failed and self._next is None:
            self._next = state
        if self._must_wait(state) or self.is_step_due:
            self.postponed.append(partial(self._start_if_due, state))
        elif state.status != "finished":
            self._do("start", self._begin, state, self._clock())
            code_s = self.fiber_s + self.longest_s  # with one more start
            self.is_step_due = self._scheduler.delays_step(code_s, self._drawing())

    def _must_wait(self, state: RequestState) -> bool:
        """Whether a request may not start yet; one that failed in company waits for all others."""
        if self.private is not None or self._next not in (None, state):
            return True
        fibers = [entry.fiber for entry in self.by_number.values() if entry is not state]
        return state is self._next and any(fiber and fiber.is_alive for fiber in fibers)

    def _drawing(self, without: RequestState | None = None) -> list[ParkedCall]:
        """The last calls of the requests that draw."""
        calls = [state.parked for state in self.by_number.values() if state is not without]
        return [call for call in calls if call is not None and call.phase == "denoise"]

    def resume(self, answered: Iterable[tuple[RequestState, Any]]) -> None:
        """Resume requests with their answers or `Failure`s; skip ended requests."""
        for state, answer in answered:
            if self.private not in (None, state):
                self.postponed.append(partial(self.resume, [(state, answer)]))
            elif state.status == "running":
                self._do("resume", self._resume, state, answer)

    def _do(
        self, stage: RequestStage, work: Callable[..., None], state: RequestState, *args: Any
    ) -> None:
        """Do work for one request; an exception ends this request and no other."""
        try:
            if self._stages.has_faults:
                self._stages.reach(stage, [state])
            work(state, *args)
        except UNCONTAINED:
            raise
        except BaseException as error:
            self._fail(state, error)

    def _begin(self, state: RequestState, now_s: float) -> None:
        """Run a request's pipeline from its beginning."""
        self._next, request = None if state is self._next else self._next, state.request
        reasons = [] if state.is_private else self.rides.private_reasons(request)
        is_private = state.is_private or bool(reasons)
        state.warnings += self.rides.warnings(reasons)
        if is_private:
            self.private = state
        self.answers.begin(state, is_private=is_private)
        original = self._loaded.originals[request.task]
        pipe = original if is_private else view(self._loaded, request.task)
        state.context = context = self._context(state, pipe)
        if request.scheduler is not None:  # bypass its setter, which writes the configuration
            vars(pipe)["scheduler"] = exchanged(original.scheduler, request.scheduler)
        hook, tell = self._previews.hook, partial(self._tell, state)
        state.preview_hook = self._stages.contain("preview", None, hook, pipe, request, tell)
        if parts := getattr(pipe, "parts_after_steps", 0):
            state.timeline.parts, context.tell_share = parts, partial(self._tell_share, state)
        if isinstance(pipe, TextPipeline):
            pipe.on_text = partial(self._tell_text, state)
        state.observe(pipe, context, self._loaded.card)
        state.warnings += self._adapters.warnings(request.lora)
        tell_prompt, language = partial(self._tell_prompt, state), self._loaded.language
        body = partial(call, pipe, request, self._loaded.card, tell_prompt, language)
        state.start(pipe, context, body, now_s)
        self._resume(state)

    def _context(self, state: RequestState, pipe: Any) -> RideContext:
        loaded, request = self._loaded, state.request
        if state is not self.private:
            has_switches = runs_foreign_code(pipe, request.arguments)
            context = self._isolation.context(request.seed, has_switches=has_switches)
            context.prompt_part = partial(self._prompt_part, state)
            return context
        state.timeline.exclusive = sorted(loaded.modules)
        return PrivateContext(pipe, loaded.modules, request.seed, loaded.device.torch)

    def _prompt_part(self, state: RequestState, component: str, tokens: int) -> int:
        part = partial(self._scheduler.prompt_part, component, tokens)
        return tokens if self._is_exact else part(self._drawing(state))

    def resume_held(self) -> None:
        """Do the work postponed during a private ride, or for a step."""
        postponed, self.postponed = ([], self.postponed) if self.private else (self.postponed, [])
        for work in postponed:
            work()

    def end_cancelled(self) -> None:
        """End the requests, running or queued, that were cancelled or have timed out."""
        if self._queue.has_ended:
            for state, error in self._queue.take_ended(self.by_number.values()):
                self._end(state, None, error)

    def take_news(self) -> None:
        """Process the inbox from other threads: cancellations, releases, results of host calls."""
        self.end_cancelled()
        for state in self._queue.take_released(self.states):
            state.timeline.is_moved = True
            self._end(state, None, Released("another engine goes on with it"))
        self.resume(self._queue.take_host_results())

    def end_all(self, error: CarpoolError) -> None:
        """End all requests, running or queued, even in a lost engine."""
        for state in [*self._queue.take_all(), *self.states]:
            with suppress(EngineLost):
                self._end(state, None, error)

    def _resume(self, state: RequestState, answer: Any = None) -> None:
        """Run a request's pipeline until it waits for a forward, or ends."""
        is_answer = state.is_parked and not isinstance(answer, Failure)
        if is_answer and state.call.target.phase in state.answered_phases:
            self.answers.ran(state, state.call, answer)
        while (answer := self._advance(state, answer)) is not None:
            pass  # answered without a forward

    def _advance(self, state: RequestState, answer: Any) -> Any | None:
        """Run a pipeline until its next call or its end; returns an answer without a forward."""
        began_s, failed_forward = self._heartbeat.beat(), None
        self.have_advanced = True
        if isinstance(answer, Failure):
            failed_forward = answer.error if state.is_parked else None
            outcome: FiberState = state.resume(error=answer.error)
        else:
            outcome = state.resume(answer)
        now_s = self._clock()
        self.fiber_s += now_s - began_s
        self.longest_s = max(self.longest_s, now_s - began_s)
        context = state.context
        changed = context.changes.names if isinstance(context, RequestContext) else ()
        if changed and isinstance(outcome, Call | HostCall):
            note = partial(self.rides.changed, state.request, list(changed))
            self._do("start", self._go_private, state, note, now_s)
            return None
        if isinstance(outcome, Call):
            return self._park(state, outcome, now_s)
        if isinstance(outcome, HostCall):
            run = self._off_loop.wait if outcome.waits else self._off_loop.host
            run(partial(run_on_host, outcome, partial(self._queue.put_host_result, state)))
        elif isinstance(outcome, Returned):
            if state.timeline.reached(state.timeline.steps):
                self._tell_step(state, now_s)
            if state.has_failed:
                self.rides.succeeded(state.request)
            if (effects := state.effects) is not None:
                warn, about = effects.warn, (state.view, state.warnings, state.request_id)
                self._stages.contain("effects", None, warn, *about)
            self._end(state, outcome.value, None)
        else:
            assert isinstance(outcome, Raised)
            is_due = self._second_runs.is_due
            if self._loaded.group is None and is_due(state, outcome.error, failed_forward):
                state.has_failed = True
                note = partial(self.rides.failed, state.request, outcome.error)
                self._do("start", self._go_private, state, note, now_s)
                return None
            raised = state, outcome.error, failed_forward, self._loaded.card.defaults
            error = self._stages.contain("count", None, error_of, *raised)
            self._fail(state, outcome.error, error)
        return None

    def _park(self, state: RequestState, parked: Call, now_s: float) -> Any | None:
        self._calls += 1
        contain, describer, request = self._stages.contain, self._describer, state.request
        phase, descriptions, effects = parked.target.phase, state.descriptions, state.effects
        if phase == "denoise" and effects is not None and not effects.has_begun:
            contain("effects", None, effects.denoises, state.view, parked)
        described = contain(
            "describe", None, describer.describe, parked, request, descriptions, states=[state]
        )
        parked, key, rows = described or describer.alone(parked, request)
        if state.pixel_limit is not None and (key is not state.key or phase != "denoise"):
            try:
                state.pixel_limit.check(parked)
            except BaseException as error:  # above the limit, or no measurable shape
                return Failure(error)
        steps_done = contain("steps", state.timeline.step, state.steps_done, phase, states=[state])
        if (hook := state.preview_hook) is not None and phase == "denoise":
            contain("preview", None, hook.note_layout, parked.arguments(), states=[state])
        if state.park(parked, key, rows, self._calls, steps_done, now_s):
            self._tell_step(state, now_s)
        answer = self.answers.answer(state, parked) if phase in state.answered_phases else None
        if isinstance(answer, StartOver):
            self._start_over(state, answer, now_s)
            return None
        if answer is None:
            module = parked.target.component, parked.target.method
            contain("timeline", None, self._timelines.parked, state.timeline, module, key, now_s)
        return answer

    def _go_private(self, state: RequestState, note: Callable[[], str], now_s: float) -> None:
        """Run a request again from the start, alone; `note` returns the warning for its client."""
        warning = note()
        self._rewind(state, now_s)
        state.warnings.append(warning)
        state.is_private = True
        self.postponed.append(partial(self._start_if_due, state))

    def _start_over(self, state: RequestState, why: StartOver, now_s: float) -> None:
        """Run a request again from the start: its recorded answers do not match it."""
        log.warning("request %s starts over, %s", state.request_id, why.reason)
        self._rewind(state, now_s)
        self._begin(state, now_s)

    def _rewind(self, state: RequestState, now_s: float) -> None:
        state.forget_earlier_run()
        state.rewind()
        self._tell(state, Event("step", state.request_id, now_s))

    def _tell_step(self, state: RequestState, now_s: float) -> None:
        if state.journal is not None and state.is_replaying:
            return  # reported by its earlier run
        self._stats.step(now_s)
        timeline = state.timeline
        self._tell(state, Event("step", timeline.request_id, now_s, *timeline.progress))

    def _tell_share(self, state: RequestState, share: float) -> None:
        """Report the work of a request after its last step. On any thread, as `_tell_prompt`."""
        timeline, before = state.timeline, state.timeline.progress
        if state.status == "finished":
            raise Cancelled("the request has ended")
        timeline.step, timeline.part = timeline.steps, int(share * timeline.parts)
        if timeline.progress > before:
            self._tell(state, Event("step", state.request_id, self._clock(), *timeline.progress))

    def _tell_text(self, state: RequestState, text: str, tokens: int, limit: int) -> None:
        now_s = self._clock()
        self._tell(state, Event("preview", state.request_id, now_s, tokens, limit, text=text))

    def _tell_prompt(self, state: RequestState, text: str, *, is_whole: bool = False) -> None:
        """Report the prompt as rewritten so far. On any thread; `Cancelled` ends a late writer."""
        if state.status == "finished":
            raise Cancelled("the request has ended")
        now_s = self._clock()
        if is_whole or now_s >= state.prompt_told_s + PROMPT_EVERY_S:
            state.prompt_told_s = now_s
            self._tell(state, Event("prompt", state.request_id, now_s, text=text))

    def _tell(self, state: RequestState, event: Event) -> None:
        if not state.is_answered:  # otherwise the watchdog has answered the client
            self._stages.contain("tell", None, state.listener.event, event, states=[state])

    def _fail(
        self, state: RequestState, error: BaseException, mapped: Exception | None = None
    ) -> None:
        """End a request with an exception, unless it has ended.

        Args:
            mapped: the error for the client; default: derived from `error`.
        """
        if state.status != "finished":
            self._stages.contain("count", None, self._loaded.device.check, error)
            self._end(state, None, mapped or to_api_error(error, is_early=False))

    def _end(self, state: RequestState, output: Any, error: Exception | None) -> None:
        """Finish a request, drop its state, and deliver its outcome, whatever fails.

        Raises:
            EngineLost: weights were changed while it ran; the engine cannot continue.
        """
        now_s, contain = self._clock(), self._stages.contain
        if error is None and state is not self.private:
            self._check_weights()
        self.by_number.pop(state.number, None)
        self._next = None if state is self._next else self._next
        state.status = "finished"
        try:
            contain("unwind", None, state.finish, states=[state])
        finally:
            if state is self.private:
                self.private = None
                self._isolation.note_weights()
                self.answers.shared.clear()
            if not self.by_number:
                contain("cache", None, self.answers.shared.note_modules)
            contain("timeline", None, self._timelines.end, state.timeline, error, now_s)
            if error is None:
                contain("learn", None, self._scheduler.ended, state)
            if now_s > state.deadline_at_s:
                self._stats.late()
            self._deliver_outcome(state, output, error, now_s)

    def _check_weights(self) -> None:
        try:
            self._isolation.check_weights()
        except EngineLost:
            for state in self.states:
                state.forget_earlier_run()
                self._tell(state, Event("step", state.request_id, self._clock()))
            raise
