"""A request aboard: its fiber, the call it is parked on, its progress and its times."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from carpool.engine.execute import Ready
from carpool.engine.fiber import Fiber
from carpool.types import Event, Job, Parked, Phase, Timings, Waiting

log = logging.getLogger("carpool")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: with the fields of the pipeline's output, or with an error."""

    job: Job
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

    job: Job
    listener: Listener
    number: int  # place in the line of requests
    submitted_s: float
    view: Any = None  # its private copy of the pipeline, once admitted
    fiber: Fiber | None = None
    waiting: Waiting | None = None  # as a policy saw it in the line
    ready: Ready | None = None  # the call it is parked on
    parked: Parked | None = None  # the same, as a policy sees it
    order: int = 0  # that call's place in the line of calls
    started_s: float = inf
    phase: Phase = "encode"
    step: int = 0
    steps: int = 0
    denoiser_calls: int = 0
    counted_step: int = 0  # the last of which it was counted how many calls it took
    _spent: dict[Phase, float] = field(default_factory=dict)
    _phase_since_s: float = 0.0

    @property
    def due_s(self) -> float:
        timeout_s = self.job.timeout_s
        return inf if timeout_s is None else self.submitted_s + timeout_s

    def start(self, view: Any, body: Callable[[], Any], now_s: float) -> Any:
        """Get aboard; gives the first call it parks on, or its end."""
        self.view, self.fiber = view, Fiber(body)
        self.started_s = self._phase_since_s = now_s
        return self.fiber.start()

    def park(self, ready: Ready, order: int, now_s: float) -> bool:
        """Wait for this call. Says whether a denoising step was completed by it."""
        self.ready, self.order = ready, order
        phase = ready.call.target.phase
        if phase != self.phase:
            self._turn_to(phase, now_s)
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

    def _turn_to(self, phase: Phase, now_s: float) -> None:
        spent = self._spent.get(self.phase, 0.0) + now_s - self._phase_since_s
        self._spent[self.phase] = spent
        self.phase, self._phase_since_s = phase, now_s

    def leave(self, now_s: float) -> Timings:
        """Unwind the fiber and let go of all it held. Says where the time went."""
        total_s = now_s - self.submitted_s
        if self.fiber is None:
            return Timings(queue_s=total_s, total_s=total_s)
        try:
            self.fiber.close()
        except RuntimeError:  # its own fault and loss, but nobody else's
            log.exception("request %s could not be unwound", self.job.request_id)
        self._turn_to(self.phase, now_s)
        self.ready = self.parked = self.view = self.fiber = None
        spent = {f"{phase}_s": seconds for phase, seconds in self._spent.items()}
        return Timings(queue_s=self.started_s - self.submitted_s, total_s=total_s, **spent)
