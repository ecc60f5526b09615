"""What several test files need: an engine driven by hand, and the same request run alone.

A `Drive` steps an engine on the test's own thread, with finishing work done at once, so that
who rides together is the test's choice and never the machine's. `solo` is the judge: plain
diffusers, a pipeline of its own, nothing of Carpool.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import nn

from carpool.config import BatchingMode, EngineSettings
from carpool.engine.group.load import load
from carpool.engine.loop import EngineCore
from carpool.engine.observe.timeline import Forward
from carpool.engine.request import Outcome
from carpool.request.parameters import check
from carpool.schedule.batch_modes import together
from carpool.schedule.views import Admission, Choice, ParkedCall, QueuedRequest
from carpool.types import Event, Request
from support.tiny import ARGUMENTS, checkpoint

CLOSE = 2e-5  # the most that riding together may change a pixel, values 0-1, float32


class VirtualClock:
    """Time that passes when a test says so, and by a tick whenever it is asked for."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


class Recorder:
    """A listener that keeps all it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.outcomes: list[Outcome] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def is_done(self) -> bool:
        return bool(self.outcomes)

    @property
    def outcome(self) -> Outcome:
        [outcome] = self.outcomes  # exactly one, or the engine broke its word
        return outcome

    @property
    def error(self) -> Exception | None:
        return self.outcome.error

    @property
    def image(self) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        image = self.outcome.fields["images"]
        assert isinstance(image, torch.Tensor)
        return image

    @property
    def step(self) -> int:
        return max(event.step for event in self.events)


class InLine:
    """Calls in the order in which they parked, each with all others of its key: fuses most.

    So that tests of the engine do not depend on what the scheduler thinks is worth it.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running

    def admit(self, waiting: Sequence[QueuedRequest], aboard: int, now_s: float) -> Admission:
        free = self._max_running - aboard
        return Admission(tuple(one.request for one in waiting[: max(0, free)]))

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        return together(parked)


class Drive:
    """An engine on the test's own thread."""

    def __init__(self, engine: EngineCore, forwards: list[Forward]) -> None:
        self.engine, self.forwards = engine, forwards
        self.second_runs: list[Forward] = []  # of what failed among others, alone
        engine._observers.append(self._note)

    def _note(self, forward: Forward) -> None:
        states = [self.engine.running.by_number[line.number] for line in forward.timelines]
        if all(state.has_failed for state in states):
            self.second_runs.append(forward)

    def submit(self, prompt: Any = "a photo of a cat", **parameters: Any) -> Recorder:
        """Submit a request; `seed`, `timeout_s`, `request_id` or the pipeline's parameters."""
        return self.put(Request(prompt, **{"seed": 0, **parameters}))

    def put(self, request: Request) -> Recorder:
        recorder = Recorder()
        self.engine.submit(check(self.engine.loaded.card, request), recorder)
        return recorder

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()

    def turn_until(self, is_reached: Callable[[], bool]) -> None:
        for _ in range(3000):
            if is_reached():
                return
            assert self.engine.step(), "the engine is idle, and it never came about"
        raise AssertionError("three thousand turns, and it never came about")

    def finish(self) -> None:
        while self.engine.step():
            pass

    def widths(self, component: str, method: str = "forward") -> list[int]:
        """Requests in each forward with calls of a method, in the order in which they were run."""
        runs = [f for f in self.forwards if f.component == component]
        return [f.requests for f in runs if method in f.methods]

    def widest(self, component: str, method: str = "forward") -> int:
        return max(self.widths(component, method))


@contextmanager
def driving(
    model: str | Path | DiffusionPipeline,
    *,
    clock: VirtualClock | None = None,
    mode: BatchingMode | None = None,
    **settings: Any,
) -> Iterator[Drive]:
    """Drive an engine by hand; afterwards modules and thread are as they were.

    Args:
        model: a family, whose pipeline all tests of the process share, or one of the test's own.
        clock: the engine's; without one, time stands still.
        mode: of batching; without one, all that may fuse does: see `InLine`.
        settings: of `EngineSettings`.
    """
    pipe = served(model) if isinstance(model, str) else model  # a folder is loaded anew
    modes = {} if mode is None else {"batching_mode": mode}
    usual = {"device": "cpu", "conditioning_cache": 0.0}  # each encoding is a forward that counts
    chosen = EngineSettings(**{**usual, **modes, **settings})
    forwards: list[Forward] = []
    engine = EngineCore(
        load(pipe, chosen), chosen, clock=clock or VirtualClock(), off_loop=lambda work: work(),
        observers=[forwards.append], policy=InLine(chosen.max_running) if mode is None else None,
    )  # fmt: skip
    grads = torch.is_grad_enabled()
    engine.enter()
    try:
        yield Drive(engine, forwards)
    finally:
        engine.leave()
        torch.set_grad_enabled(grads)


@cache
def plain(family: str) -> DiffusionPipeline:
    """A family's pipeline that Carpool never touches."""
    return for_inference(fresh(family))


def for_inference(pipe: Any) -> Any:
    """Make a pipeline as an engine has it: quiet, in eval mode, and with weights without gradients,
    for which torch takes other kernels (4e-7 apart).
    """
    pipe.set_progress_bar_config(disable=True)
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            module.eval().requires_grad_(False)
    return pipe


def called(pipe: Any, seed: int, *args: Any, **arguments: Any) -> Any:
    """The output of plain diffusers for a request, every random generator seeded."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    with torch.no_grad():
        return pipe(*args, **arguments, generator=torch.Generator().manual_seed(seed))


@cache
def served(family: str) -> DiffusionPipeline:
    """A family's pipeline for engines, one after another."""
    return fresh(family)


def fresh(family: str) -> DiffusionPipeline:
    """A family's pipeline that the test may break."""
    return copy.deepcopy(_loaded(family))  # in a third of the time that loading takes


@cache
@torch.no_grad()  # copies of weights that `weight_norm` computes need no graph
def _loaded(family: str) -> DiffusionPipeline:
    return DiffusionPipeline.from_pretrained(checkpoint(family))


def solo(family: str, prompt: str, *, seed: int = 0, **parameters: Any) -> torch.Tensor:
    """The image that plain diffusers gives for a request, (1, 3, H, W), values 0-1."""
    arguments = {**ARGUMENTS[family], "prompt": prompt, **parameters}
    image = called(plain(family), seed, **arguments).images
    assert isinstance(image, torch.Tensor)
    return image


def gap(left: Any, right: Any) -> float:
    """Of tensors: the largest difference between two images; infinite when one holds a NaN."""
    assert left.shape == right.shape
    return float((left - right).abs().nan_to_num(nan=torch.inf).max())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
