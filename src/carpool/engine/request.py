"""A request aboard: its fiber, the call it is parked on, its progress and its times."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from carpool.engine.execute import Ready
from carpool.engine.fiber import Fiber
from carpool.engine.isolation import RequestContext
from carpool.engine.model.preview import Watch
from carpool.engine.observe.timeline import Life
from carpool.types import CheckedRequest, Event, ParkedCall, Phase, QueuedRequest, Timings

log = logging.getLogger("carpool")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: with the fields of the pipeline's output, or with an error."""

    job: CheckedRequest
    fields: dict[str, Any]  # "images", "frames", ...: on the host, in the type asked for
    error: Exception | None
    timings: Timings


class Listener(Protocol):
    """Whoever submitted a request. Called on the engine's threads: must not block."""

    def event(self, event: Event) -> None: ...

    def done(self, outcome: Outcome) -> None:
        """Called once, after every event but before `finished`."""
        ...


@dataclass(slots=True)
class Rider:
    """A request from its submission to its end. Only the engine's thread changes it."""

    job: CheckedRequest
    listener: Listener
    number: int  # place in the line of requests
    life: Life
    view: Any = None  # its private copy of the pipeline, once admitted
    watch: Watch | None = None  # of its scheduler, if it wants previews
    fiber: Fiber | None = None
    context: RequestContext | None = None  # what it has for itself while its fiber runs
    waiting: QueuedRequest | None = None  # as a policy saw it in the line
    ready: Ready | None = None  # the call it is parked on
    parked: ParkedCall | None = None  # the same, as a policy sees it
    order: int = 0  # that call's place in the line of calls
    step: int = 0
    steps: int = 0
    denoiser_calls: int = 0
    counted_step: int = 0  # the last of which it was counted how many calls it took

    @property
    def submitted_s(self) -> float:
        return self.life.submitted_s

    @property
    def due_s(self) -> float:
        timeout_s = self.job.timeout_s
        return inf if timeout_s is None else self.submitted_s + timeout_s

    @property
    def wanted_s(self) -> float:
        """When it was wished to be done."""
        deadline_s = self.job.deadline_s
        return inf if deadline_s is None else self.submitted_s + deadline_s

    def start(self, view: Any, body: Callable[[], Any], now_s: float) -> Any:
        """Get aboard; gives the first call it parks on, or its end."""
        self.view, self.fiber = view, Fiber(body, self.context)
        self.life.start(now_s)
        return self.fiber.start()

    def park(self, ready: Ready, order: int, now_s: float) -> bool:
        """Wait for this call. Says whether a denoising step was completed by it."""
        self.ready, self.order = ready, order
        phase = ready.call.target.phase
        if self.watch is not None and phase == "denoise":
            self.watch.saw(ready.call.arguments())
        if phase != self.life.phase:
            self.life.turn_to(phase, now_s)
        done = self.steps if phase == "decode" else self._steps_done(phase)
        ticked = done > self.step
        self.step = max(done, self.step)
        return ticked

    def arrive(self) -> bool:
        """The pipeline has returned. Says whether a last step was completed by it."""
        ticked, self.step = self.step < self.steps, self.steps
        return ticked

    def _steps_done(self, phase: Phase) -> int:
        """Steps behind us, by the request's own scheduler; by calls where it does not count."""
        if phase != "denoise":
            return self.step
        scheduler: Any = getattr(self.view, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        self.steps = len(timesteps) if timesteps is not None else 0
        calls, self.denoiser_calls = self.denoiser_calls, self.denoiser_calls + 1
        if hasattr(scheduler, "step_index"):
            return int(scheduler.step_index or 0)  # None before its first step
        return min(calls, self.steps)

    def leave(self) -> None:
        """Unwind the fiber and let go of all it held."""
        if self.fiber is None:
            return
        try:
            self.fiber.close()
        except RuntimeError:  # its own fault and loss, but nobody else's
            log.exception("request %s could not be unwound", self.job.request_id)
        if self.context is not None:
            self.context.free()
        self.ready = self.parked = self.view = self.fiber = self.watch = self.context = None
