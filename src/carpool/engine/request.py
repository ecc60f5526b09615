"""The state of one request in the engine.

A `RequestState` is `queued`, then `running` in a fiber, then `finished`; the queue creates it and
only the engine's thread changes it. While it runs, its fiber is either parked on a call
(`is_parked`), or waits for work on another thread. Policies see frozen views of it
(`carpool.schedule.views`); its `timeline` records its history and outlives it.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, Literal, Protocol

from carpool.engine.containment import TurnStage
from carpool.engine.describe import Descriptions
from carpool.engine.fiber import Fiber, Raised, Returned
from carpool.engine.foreign_code import is_of_a_library
from carpool.engine.intercept import Call
from carpool.engine.isolation import RequestContext
from carpool.engine.journal import Journal
from carpool.engine.model.preview import SchedulerHook
from carpool.engine.observe.no_effect import EffectObserver
from carpool.engine.observe.timeline import Timeline
from carpool.engine.pixel_limit import PixelLimit
from carpool.engine.private_ride import PrivateContext
from carpool.engine.tokenizers import HostCall
from carpool.request.card import Card
from carpool.request.prompt_weights import PROMPTS, weights_warning
from carpool.request.sizes import rounded_size
from carpool.schedule.views import ParkedCall, QueuedRequest
from carpool.types import CheckedRequest, Event, Phase, Timings

log = logging.getLogger("carpool")

RideContext = RequestContext | PrivateContext


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a request: the fields of the pipeline's output, or an error."""

    request: CheckedRequest
    fields: dict[str, Any]  # "images", "frames", ...: on the host, in the requested type
    error: Exception | None
    timings: Timings
    warnings: tuple[str, ...] = ()  # shown to the client, such as a truncated prompt
    skipped_steps: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # actually used by the pipeline


class Listener(Protocol):
    """Receives the events of one request. Called on the engine's threads: must not block."""

    def event(self, event: Event) -> None: ...

    def done(self, outcome: Outcome) -> None:
        """Called once: before the `finished` event, after all the others."""
        ...


class AnswerSource(Protocol):
    """Answers some calls of one request."""

    stage: ClassVar[TurnStage]  # the boundary that contains its failures
    phases: ClassVar[tuple[Phase, ...]]  # it may answer, and observes, calls of these phases
    warning: ClassVar[str]  # shown to the client if the source fails; "": no warning

    def answer(self, call: Call) -> Any | None:
        """The answer of a call; None: it has none. Called at most once for each call.

        Raises:
            Mismatch: the request has to run from its start, without earlier answers.
        """
        ...

    def ran(self, call: Call, answer: Any) -> None:
        """A call got this answer from a forward, or from another source."""
        ...


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from its submission to its end."""

    request: CheckedRequest
    listener: Listener
    number: int  # numbered in the order of submission
    timeline: Timeline
    status: Literal["queued", "running", "finished"] = "queued"
    queued: QueuedRequest | None = None  # the policy's view while it is queued
    parked: ParkedCall | None = None  # the policy's view of its last call
    fiber: Fiber | None = None
    view: Any = None  # its private copy of the pipeline
    context: RideContext | None = None  # its private state while its fiber runs
    preview_hook: SchedulerHook | None = None
    sources: list[AnswerSource] = field(default_factory=list)  # answer without a forward
    answered_phases: set[Phase] = field(default_factory=set)  # `sources` may answer these
    pixel_limit: PixelLimit | None = None  # set once it runs
    effects: EffectObserver | None = None  # set once it runs
    descriptions: Descriptions = field(default_factory=dict)
    is_parked: bool = False
    is_private: bool = False  # it rides alone, on the original pipeline
    has_company: bool = False  # another request was in the engine at the same time
    has_failed: bool = False  # failed in company: runs again alone
    warnings: list[str] = field(default_factory=list)
    journal: Journal | None = None  # records the answers of its calls
    call: Call = field(init=False)  # the call it is parked on; unset while it is not
    key: Hashable = None  # the fuse key of that call
    rows: int = 0  # batch rows of that call
    order: int = 0  # calls are numbered as they park; 0: before the first call
    denoiser_calls: int = 0
    writer: str = ""  # the component that writes its text
    counted_step: int = 0  # last step whose denoiser calls the predictor has counted
    prompt_told_s: float = -inf  # when its rewritten prompt was last reported; engine clock
    is_answered: bool = False  # its listener has the outcome, or is about to get it
    _answering: threading.Lock = field(default_factory=threading.Lock)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def submitted_s(self) -> float:
        return self.timeline.submitted_s

    @property
    def timeout_at_s(self) -> float:
        """When the request times out; engine clock."""
        timeout_s = self.request.timeout_s
        return inf if timeout_s is None else self.submitted_s + timeout_s

    @property
    def deadline_at_s(self) -> float:
        """The client's deadline; engine clock."""
        deadline_s = self.request.deadline_s
        return inf if deadline_s is None else self.submitted_s + deadline_s

    @property
    def is_replaying(self) -> bool:
        """Whether it still repeats an earlier run from its journal."""
        return self.journal is not None and self.journal.is_replaying

    def forget_earlier_run(self) -> None:
        """Drop the answers of an earlier run: its calls run again."""
        if self.journal is not None:
            self.journal.drop()

    def observe(self, pipe: Any, context: RideContext, card: Card) -> None:
        """Set up the checks and warnings that observe the request while its pipeline runs."""
        request, task = self.request, card.task(self.request.task)
        self.pixel_limit = PixelLimit(pipe, card, task)
        self.effects = effects = EffectObserver(card, task, request.arguments)
        context.request_id, context.warnings = request.request_id, self.warnings
        context.names, context.note_texts = effects.arguments.keys(), effects.tokenizes
        rounded = rounded_size(card, task, request.arguments)
        self.warnings += [*request.warnings, *([rounded] if rounded else [])]
        if request.prompt_weights is None and task.makes != "text" and is_of_a_library(type(pipe)):
            for name in PROMPTS:  # a class of the user's own may read weights by itself
                self.warnings += weights_warning(request.arguments.get(name), name, card)

    def start(self, view: Any, context: RideContext, body: Callable[[], Any], now_s: float) -> None:
        """From queued to running. The caller starts the fiber next, with `resume`."""
        self.status, self.view, self.context = "running", view, context
        self.fiber = Fiber(body, context)
        self.timeline.start(now_s)

    def resume(self, answer: Any = None, error: BaseException | None = None) -> Any:
        """Run the pipeline's code until its next call or its end.

        Args:
            answer: the answer of the call that it waited for; ignored at the start.
            error: raised in the pipeline instead.

        Returns:
            A `Call`, a `HostCall`, or the result of `Fiber` at the end: `Returned` or `Raised`.
        """
        fiber = self.fiber
        assert fiber is not None, "only running requests are resumed"
        if self.is_parked:
            self.is_parked = False
            del self.call  # frees its tensors as soon as the pipeline drops them
        elif not fiber.is_alive:
            return fiber.start()
        return fiber.resume(answer) if error is None else fiber.fail(error)

    def park(
        self, call: Call, key: Hashable, rows: int, order: int, steps_done: int, now_s: float
    ) -> bool:
        """Wait for a forward of this call. Returns whether a denoising step was completed."""
        self.call, self.key, self.rows, self.order, self.is_parked = call, key, rows, order, True
        phase, timeline = call.target.phase, self.timeline
        if phase != timeline.phase:
            timeline.enter(phase, now_s)
        return timeline.reached(timeline.steps if phase == "decode" else steps_done)

    def steps_done(self, phase: Phase) -> int:
        """Steps done, as its scheduler counts them, else by its denoiser calls.

        Call it once for each call that parks.
        """
        if phase != "denoise":
            return self.timeline.step
        calls, self.denoiser_calls = self.denoiser_calls, self.denoiser_calls + 1
        scheduler: Any = getattr(self.view, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        steps = self.timeline.steps = len(timesteps) if timesteps is not None else 0
        try:
            return int(scheduler.step_index or 0)  # None before its first step
        except AttributeError:
            return min(calls, steps)

    def take_answer(self) -> bool:
        """Claim the delivery of the outcome: True for the first caller. From any thread."""
        self.is_answered = True
        return self._answering.acquire(blocking=False)

    def rewind(self) -> None:
        """Reset to before the pipeline began, still running: `start` comes next."""
        self._unwind()
        self.warnings.clear()
        self.denoiser_calls = self.counted_step = 0
        self.timeline.rewind()

    def finish(self) -> None:
        """From queued or running to finished: unwind the fiber and drop its references."""
        self.status = "finished"
        self._unwind()
        self.view = self.fiber = self.preview_hook = self.parked = self.context = None
        self.journal, self.sources = None, []

    def _unwind(self) -> None:
        if self.fiber is not None:
            try:
                self.fiber.close()
            except RuntimeError:  # a defect of this request only
                log.exception("request %s could not be unwound", self.request_id)
        if self.is_parked:
            self.is_parked = False
            del self.call
        if self.context is not None:
            self.context.free()
        self.descriptions.clear()


FiberState = Call | HostCall | Returned | Raised
"""The results of `RequestState.resume`."""
