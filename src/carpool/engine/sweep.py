"""The shared sweep: forwards of any keys, sizes and widths walk through streamed weights together.

Each forward runs in a fiber of its own and pauses where diffusers' group offloading would load a
block. Once all have come to a block, its weights are loaded once and every forward that stands
there runs through it, up to its next one. The forward that is furthest behind goes first: one that
failed and begins again catches up with the others.

A forward that raises ends alone. What is state of the thread while it runs, and must not be that of
the next one, is put aside while it pauses: see `ForwardContext`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.overrides import _get_current_function_mode_stack

from carpool.engine import random_state
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.execute import Ready, RunCalls, WidthLimits, execute
from carpool.engine.fiber import Fiber, Raised, Returned, in_fiber, park
from carpool.engine.intercept import Call, Target
from carpool.engine.model.stopwatch import Laps, Stopwatch
from carpool.engine.probation.snapshot import ModuleSnapshot
from carpool.engine.thread_modes import ThreadModes
from carpool.engine.weights.groups import BlockGroup
from carpool.engine.weights.streaming import Streamer
from carpool.types import Clock

log = logging.getLogger("carpool")

MAX_UNSETTLED = 3  # forwards that may leave something between blocks: caches fill in the first

T = TypeVar("T")
R = TypeVar("R", bound=Ready)


@dataclass(frozen=True, slots=True)
class _Last:
    """Where a forward waits until no other stands before a block."""


def wait_for_others() -> None:
    """In a forward that shares a sweep: go on when all others have ended, and so use no memory."""
    if in_fiber("forward"):
        park(_Last())


class ForwardContext:
    """The private state of a forward while others of its sweep run: see `fiber.FiberContext`.

    Torch's modes of the thread (gradients, autocast), its function modes (exact numerics), the
    global random numbers, which rows have which adapters, and the stopwatch of the device.
    """

    def __init__(self, adapters: Adapters, clock: Clock, watch: Stopwatch | None) -> None:
        self._adapters, self._clock, self._watch = adapters, clock, watch
        self._laps: Laps | None = None
        self._modes = ThreadModes()
        self._random: tuple[random_state.RandomState, int] | None = None
        self._functions: list[Any] = []
        self._depth = 0
        self._adapter_plan: Any = None
        self._began_s = 0.0
        self._spent_s = 0.0

    @property
    def spent_s(self) -> float:
        """How long the forward has run so far, pauses left out."""
        return self._spent_s + self._clock() - self._began_s

    def enter(self) -> None:
        self._modes.enter()
        random_state.show(self._random)
        self._depth = len(_function_modes())
        for mode in self._functions:
            mode.__enter__()
        self._adapter_plan = self._adapters.swap(self._adapter_plan)
        self._swap_laps()
        self._began_s = self._clock()

    def leave(self) -> None:
        self._spent_s = self.spent_s
        self._swap_laps()
        self._adapter_plan = self._adapters.swap(self._adapter_plan)
        self._functions = _function_modes()[self._depth :]
        for mode in reversed(self._functions):
            mode.__exit__(None, None, None)
        self._random = random_state.hide()
        self._modes.leave()

    def _swap_laps(self) -> None:
        if self._watch is not None:
            self._laps = self._watch.swap(self._laps)


class Sweeps:
    """Runs sets of forwards over the streamed weights of one pipeline. For the engine's thread.

    Args:
        watch: times forwards on the device; it is stopped while they pause.
    """

    def __init__(
        self,
        streamer: Streamer,
        adapters: Adapters,
        clock: Clock,
        watch: Stopwatch | None = None,
    ) -> None:
        self._streamer, self._adapters, self._clock = streamer, adapters, clock
        self._watch = watch
        self._running: ForwardContext | None = None
        self._pausing: dict[Hashable, bool] = {}  # by kind of call: see `may_pause`
        self._unsettled: Counter[Hashable] = Counter()
        self.sweeps = self.forwards = 0

    def streams(self, target: Target) -> bool:
        """Whether weights of a call's module are streamed."""
        return target.component in self._streamer.components

    def may_pause(self, call: Call) -> bool:
        """Whether other forwards may run while one of such a call stands before a block.

        That was observed: it had left its module, and the random numbers, before every block as
        they were at its beginning.
        """
        is_token = call.target.method == "generate"  # whose forward changes its module for a while
        is_apart = call.target.is_exclusive or is_token
        return not is_apart and self._pausing.get(_sharing_key(call), False)

    def execute(
        self,
        selections: Sequence[Sequence[R]],
        run: Callable[[Sequence[R]], list[Any]],
        widths: WidthLimits,
        free: Callable[[], None],
        is_settled: Callable[[Sequence[R]], bool],
    ) -> list[Any]:
        """Answers, or `Failure`s, of the calls of these forwards, in order; one sweep for all.

        A forward that is to be proven, or runs in its request's own state, runs by itself.

        Args:
            selections: calls of one key each; of several keys only where all `may_pause`.
            run: makes one forward of calls.
            widths: learns from forwards that ran out of memory.
            free: gives cached device memory back before another try.
            is_settled: whether the forward of these calls needs no proof.
        """
        answers: dict[int, list[Any]] = {}
        together: dict[int, Callable[[], list[Any]]] = {}
        for number, ready in enumerate(selections):
            if ready[0].call.target.is_exclusive or not is_settled(ready):
                answers[number] = execute(ready, run, widths, free)
            else:
                last = partial(_free_last, free)
                together[number] = partial(execute, ready, run, widths, last)
        if together:
            first = selections[next(iter(together))][0].call
            look = self._looking(first) if len(together) == 1 else None
            results = self.run(list(together.values()), look.look if look else lambda: None)
            answers |= zip(together, results, strict=True)
            if look is not None:
                self._note(first, look)
        return [answer for number in range(len(selections)) for answer in answers[number]]

    def around(self, run: RunCalls) -> RunCalls:
        """The same forward, whose weights are streamed."""

        def streaming(ready: Sequence[Ready]) -> list[Any]:
            with self._streamer.watching(ready[0].call.target.component):
                return run(ready)

        return streaming

    def clock(self) -> float:
        """A clock that stands still for the running forward while others of its sweep run."""
        return self._clock() if self._running is None else self._running.spent_s

    def run(
        self, forwards: Sequence[Callable[[], T]], look: Callable[[], object] = lambda: None
    ) -> list[T]:
        """Run forwards in one sweep, each group of weights loaded once for all that need it.

        Args:
            forwards: to run, each in a fiber.
            look: called before every group is loaded, when no streamed weights are there.

        Returns:
            What they returned, in order.

        Raises:
            the first exception that one of them raised, when all have ended.
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
        """Take the forwards that are furthest behind one block further."""
        groups = [outcome for outcome in stands.values() if isinstance(outcome, BlockGroup)]
        if not groups:
            number = next(iter(stands))
            del stands[number]
            go_on(number)
            return
        group = min(groups, key=lambda candidate: candidate.place)
        here = [number for number, outcome in stands.items() if outcome is group]
        for number in here:
            del stands[number]
        self._streamer.require(group)
        try:
            for number in here:
                go_on(number)
        finally:
            self._streamer.release(group)

    def _looking(self, call: Call) -> "_ForwardState | None":
        """Observes a forward, if it is not yet known whether others may run while it pauses."""
        kind = _sharing_key(call)
        return None if kind in self._pausing else _ForwardState(call.target.module, self._streamer)

    def _note(self, call: Call, look: "_ForwardState") -> None:
        kind = _sharing_key(call)
        if look.changed is None:
            self._pausing[kind] = True
            return
        self._unsettled[kind] += 1
        if self._unsettled[kind] >= MAX_UNSETTLED:
            self._pausing[kind] = False
            log.warning(
                "%s.%s keeps state between its blocks (%s): nothing else shares its sweeps over "
                "streamed weights", call.target.component, call.target.method, look.changed,
            )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """Sweeps, the forwards that shared them, and what the streamer counts."""
        return {"sweeps": self.sweeps, "forwards": self.forwards, **self._streamer.statistics()}


def _function_modes() -> list[Any]:
    """The function modes of the thread, the outermost first."""
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


class _ForwardState:
    """The state that a forward leaves on its module and in random generators between its blocks."""

    def __init__(self, module: nn.Module, streamer: Streamer) -> None:
        self._module, self._streamer = module, streamer
        self._before, self._pins = ModuleSnapshot.of(module), streamer.pins
        self.changed: str | None = None

    def look(self) -> None:
        """Before a group is loaded, when no streamed weights are there."""
        if self._streamer.pins != self._pins:
            self.changed = "weights that stay on the device from now on"
        elif self.changed is None:
            self.changed = ModuleSnapshot.of(self._module).differs(self._before)


def _sharing_key(call: Call) -> Hashable:
    """Calls that take the same way through their module, as far as one can tell."""
    present = frozenset(name for name, value in call.arguments().items() if value is not None)
    return id(call.target.module), call.target.method, present, bool(call.lora)


def _free_last(free: Callable[[], None]) -> None:
    """Free memory when the other forwards of the sweep have ended, too."""
    wait_for_others()
    free()
