"""The shared sweep: forwards of any keys, sizes and widths walk through streamed weights together.

Each forward runs in its own fiber and pauses where diffusers' group offloading would load a block.
Once all forwards have reached a block, its weights are loaded once and every forward parked there
runs through it, up to its next block. The forward that is furthest behind goes first: a forward
that failed and restarts catches up with the others.

A forward that raises ends alone. Thread state of a running forward that the next one must not see
is saved while it pauses: see `ForwardContext`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from carpool.engine import random_state
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.execute import Ready, RunCalls, WidthLimits, execute
from carpool.engine.fiber import Fiber, Raised, Returned, in_fiber, park
from carpool.engine.intercept import Call, Target
from carpool.engine.language.parts import WRITING
from carpool.engine.model.stopwatch import Laps, Stopwatch
from carpool.engine.probation.snapshot import ModuleSnapshot
from carpool.engine.thread_modes import ThreadModes
from carpool.engine.weights.groups import BlockGroup
from carpool.engine.weights.streaming import Streamer
from carpool.types import Clock

log = logging.getLogger("carpool")

MAX_UNSETTLED = 3  # forwards that leave a change between blocks: caches fill in the first ones

T = TypeVar("T")
R = TypeVar("R", bound=Ready)


@dataclass(frozen=True, slots=True)
class _Last:
    """Parked by a forward that waits until no other one is parked at a block."""


class ForwardContext:
    """The private state of a forward while others of its sweep run: see `fiber.FiberContext`.

    Torch's modes of the thread (gradients, autocast, exact numerics), the global random numbers,
    the adapters of each row, and the device stopwatch.
    """

    def __init__(self, adapters: Adapters, clock: Clock, watch: Stopwatch | None) -> None:
        self._adapters, self._clock, self._watch = adapters, clock, watch
        self._laps: Laps | None = None
        self._modes = ThreadModes()
        self._random: tuple[random_state.RandomState, int] | None = None
        self._adapter_plan: Any = None
        self._began_s = 0.0
        self._spent_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds that the forward has run so far, without pauses."""
        return self._spent_s + self._clock() - self._began_s

    def enter(self) -> None:
        random_state.show(self._random)
        self._modes.enter()
        self._adapter_plan = self._adapters.swap(self._adapter_plan)
        self._swap_laps()
        self._began_s = self._clock()

    def leave(self) -> None:
        self._spent_s = self.spent_s
        self._swap_laps()
        self._adapter_plan = self._adapters.swap(self._adapter_plan)
        self._modes.leave()
        self._random = random_state.hide()

    def _swap_laps(self) -> None:
        if self._watch is not None:
            self._laps = self._watch.swap(self._laps)


class Sweeps:
    """Runs sets of forwards over the streamed weights of one pipeline. For the engine's thread.

    Args:
        watch: times forwards on the device; stopped while they pause.
        progressed: called before each block of a forward, since a sweep may outlast the watchdog.
    """

    def __init__(
        self, streamer: Streamer, adapters: Adapters, clock: Clock, watch: Stopwatch | None = None,
        progressed: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._streamer, self._adapters, self._clock = streamer, adapters, clock
        self._watch, self._progressed = watch, progressed
        self._running: ForwardContext | None = None
        self._pausing: dict[Hashable, bool] = {}  # keyed by sharing key: see `may_pause`
        self._unsettled: Counter[Hashable] = Counter()
        self.sweeps = self.forwards = 0

    def streams(self, target: Target) -> bool:
        """Whether weights of a target's module are streamed."""
        return target.component in self._streamer.components

    def may_pause(self, call: Call) -> bool:
        """Whether other forwards may run while a forward of such a call is parked at a block.

        That was observed: at every block, its module and the random numbers were in their
        initial state.
        """
        is_text = call.target.method in WRITING  # its forward changes its module temporarily
        is_apart = call.target.is_exclusive or is_text
        return not is_apart and self._pausing.get(_sharing_key(call), False)

    def execute(
        self,
        selections: Sequence[Sequence[R]],
        run: Callable[[Sequence[R]], list[Any]],
        widths: WidthLimits,
        free: Callable[[], None],
        is_settled: Callable[[Sequence[R]], bool],
    ) -> list[Any]:
        """Run these forwards in one sweep; returns the calls' answers or `Failure`s, in order.

        A forward on probation, or in its request's own state, runs by itself.

        Args:
            selections: calls of one key each; several keys only if all `may_pause`.
            run: runs calls as one forward.
            widths: records widths that ran out of memory.
            free: releases cached device memory before a retry.
            is_settled: whether a forward of these calls needs no proof.
        """
        answers: dict[int, list[Any]] = {}
        together: dict[int, Callable[[], list[Any]]] = {}
        for number, ready in enumerate(selections):
            if ready[0].call.target.is_exclusive or not is_settled(ready):
                answers[number] = execute(ready, run, widths, free)
            else:
                together[number] = partial(execute, ready, run, widths, partial(free_last, free))
        if together:
            first = selections[next(iter(together))][0].call
            look = None
            if len(together) == 1 and _sharing_key(first) not in self._pausing:
                look = _ForwardState(first.target.module, self._streamer)
            results = self.run(list(together.values()), look.look if look else lambda: None)
            answers |= zip(together, results, strict=True)
            if look is not None:
                self._note(first, look)
        return [answer for number in range(len(selections)) for answer in answers[number]]

    def around(self, run: RunCalls) -> RunCalls:
        """Wrap a forward of streamed weights."""

        def streaming(ready: Sequence[Ready]) -> list[Any]:
            with self._streamer.watching(ready[0].call.target.component):
                return run(ready)

        return streaming

    def clock(self) -> float:
        """A clock that stops for a forward while others of its sweep run."""
        return self._clock() if self._running is None else self._running.spent_s

    def run(
        self, forwards: Sequence[Callable[[], T]], look: Callable[[], object] = lambda: None
    ) -> list[T]:
        """Run forwards in one sweep that loads each group of weights once for all.

        Args:
            forwards: functions to run, each in a fiber.
            look: called before every load of a group, while no streamed weights are in use.

        Returns:
            Their results, in order.

        Raises:
            the first exception of a forward, after all have ended.
        """
        self.sweeps += 1
        self.forwards += len(forwards)
        contexts = [ForwardContext(self._adapters, self._clock, self._watch) for _ in forwards]
        fibers = [
            Fiber(forward, context, kind="forward")
            for forward, context in zip(forwards, contexts, strict=True)
        ]
        stands: dict[int, BlockGroup | _Last] = {}
        ended: dict[int, Returned | Raised] = {}

        def go_on(number: int) -> None:
            stands.pop(number, None)
            fiber, self._running = fibers[number], contexts[number]
            outcome = fiber.resume(None) if fiber.is_alive else fiber.start()
            self._running = None
            if isinstance(outcome, (BlockGroup, _Last)):
                stands[number] = outcome
            else:
                ended[number] = outcome

        try:
            for number in range(len(fibers)):
                go_on(number)
            while stands:
                look()
                self._next(stands, go_on)
        finally:
            self._running = None
            for fiber in fibers:
                fiber.close()
        answers = []
        for number in range(len(fibers)):
            outcome = ended[number]
            if isinstance(outcome, Raised):
                raise outcome.error
            answers.append(outcome.value)
        return answers

    def _next(self, stands: dict[int, BlockGroup | _Last], go_on: Callable[[int], None]) -> None:
        """Advance the forwards that are furthest behind by one block."""
        groups = [outcome for outcome in stands.values() if isinstance(outcome, BlockGroup)]
        if not groups:
            go_on(next(iter(stands)))
            return
        group = min(groups, key=lambda candidate: candidate.place)
        here = [number for number, outcome in stands.items() if outcome is group]
        self._streamer.require(group)
        try:
            for number in here:
                self._progressed()
                go_on(number)
        finally:
            self._streamer.release(group)

    def _note(self, call: Call, look: "_ForwardState") -> None:
        kind = _sharing_key(call)
        if look.changed is None:
            self._pausing[kind] = True
            return
        self._unsettled[kind] += 1
        if self._unsettled[kind] >= MAX_UNSETTLED:
            self._pausing[kind] = False
            log.warning(
                "%s.%s keeps state between its blocks (%s): no other call shares its sweeps over "
                "streamed weights", call.target.component, call.target.method, look.changed,
            )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """Counts of sweeps and their forwards, and the streamer's statistics."""
        return {"sweeps": self.sweeps, "forwards": self.forwards, **self._streamer.statistics()}


class _ForwardState:
    """Detects changes that a forward leaves on its module and random generators between blocks."""

    def __init__(self, module: nn.Module, streamer: Streamer) -> None:
        self._module, self._streamer = module, streamer
        self._before, self._pins = ModuleSnapshot.of(module), streamer.pins
        self.changed: str | None = None

    def look(self) -> None:
        """Look before a group is loaded, while no streamed weights are in use."""
        if self._streamer.pins != self._pins:
            self.changed = "weights that stay on the device from now on"
        elif self.changed is None:
            self.changed = ModuleSnapshot.of(self._module).differs(self._before)


def _sharing_key(call: Call) -> Hashable:
    """The key of calls that probably take the same path through their module."""
    present = frozenset(name for name, value in call.arguments().items() if value is not None)
    return id(call.target.module), call.target.method, present, bool(call.lora)


def free_last(free: Callable[[], None]) -> None:
    """Free memory; in a shared sweep, after all other forwards have ended and released theirs."""
    if in_fiber("forward"):
        park(_Last())
    free()
