"""Isolation of requests that share a ride: the state that each has for itself while it runs.

A fiber's context keeps two kinds of state for its request, whatever runs between two of its turns:
the global random numbers (`random_state`) and torch's modes of the thread (`thread_modes`,
`overlay.functions`). A call in other modes than usual runs alone, in these.

What else a request changes while it runs, a shared module (`overlay`) or a switch of the process
(`switches`), is taken back when it pauses, and named: such a request has to ride privately.
"""

import contextvars
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from carpool.engine import pinned_copies, provenance, random_state
from carpool.engine.containment import EngineLost
from carpool.engine.intercept import Target, computes_together
from carpool.engine.model.pins import Pins
from carpool.engine.model.upcast import in_half, is_in_half
from carpool.engine.overlay import writes
from carpool.engine.overlay.changes import Changes
from carpool.engine.overlay.functions import FunctionModes
from carpool.engine.overlay.shared_modules import SharedModules
from carpool.engine.random_state import RandomState
from carpool.engine.switches import Switches
from carpool.engine.thread_modes import Modes, ThreadModes, is_autocast_on
from carpool.errors import PipelineFailed, named

log = logging.getLogger("carpool")


class Isolation:
    """Keeps the requests of one engine apart."""

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        device: torch.device,
        pipelines: Iterable[Any] = (),
    ) -> None:
        self._shared, self._device = SharedModules(components), device
        self._pins = Pins(components.values(), pipelines)
        is_accelerator = device.type != "cpu"
        self._patches = [*random_state.PATCHES, *([pinned_copies.TO] if is_accelerator else [])]
        self._is_installed = False
        self._drawing: set[tuple[int, str]] = set()

    def install(self) -> None:
        self._shared.install()
        self._pins.install()
        for patches in self._patches:
            patches.add()
        self._is_installed = True

    def remove(self) -> None:
        """Leave the process as `install` found it. Harmless when not installed."""
        if self._is_installed:
            self._pins.remove()
            self._shared.remove()
            for patches in self._patches:
                patches.drop()
        self._is_installed = False

    def context(self, seed: int, *, has_switches: bool = False) -> "RequestContext":
        """The state of a request that is about to start.

        Args:
            has_switches: its code may turn switches of the process.
        """
        random = RandomState(seed, self._device)
        # a tensor of the CPU can be read without waiting: nothing has to be known of it beforehand
        is_copied = self._device.type != "cpu"
        changes, switches = Changes(self._shared), Switches() if has_switches else None
        return RequestContext(
            changes, random, self._pins, switches, self._drawing, copies=is_copied
        )

    def note_weights(self) -> bool:
        """Take the weights as they are for those of the model, while no request runs.

        Returns:
            Whether they have changed.
        """
        return bool(self._shared.changed_weights())

    def check_weights(self) -> None:
        """Look whether the weights are still those of `note_weights`.

        Raises:
            EngineLost: they were written in place, where nothing reports it, while requests ran.
        """
        if names := self._shared.changed_weights():
            raise EngineLost(
                f"the weights of {', '.join(names)} were changed in place while requests ran, "
                "which cannot be undone (isolation=private runs such code one request at a time)"
            )


class RequestContext:
    """The private state of one request; see `fiber.FiberContext`."""

    is_private = is_running = False
    watch: Any = None  # adds options to `generate` that report its text; see `rewriter`

    def __init__(
        self,
        changes: Changes,
        random: RandomState,
        pins: Pins,
        switches: Switches | None,
        drawing: set[tuple[int, str]],
        *,
        copies: bool,
    ) -> None:
        self.changes, self.random, self.pins = changes, random, pins
        self.request_id, self.warnings = "", list[str]()  # whose it is; what its answer is to say
        self.names: Collection[str] = ()  # of the arguments that its request has given
        self.note_texts: Callable[[Any], None] = _nothing  # called with what it tokenizes
        self.drawing = drawing  # modules and methods that draw from the global random numbers
        self._modes, self._functions = ThreadModes(), FunctionModes()
        self._switches = switches
        self._in_other_modes: dict[Hashable, Target] = {}
        self._variables = contextvars.copy_context()  # as a fiber begins with them
        self._is_free = False
        self._copies = copies  # from the host to an accelerator

    def enter(self) -> None:
        """Show the request its own state.

        Raises:
            EngineLost: it cannot be done as a whole: others might see a part of that state.
        """
        try:
            if self._switches is not None:
                self._switches.enter()
            self._modes.enter()
            self.random.enter()
            if self._copies:
                provenance.watch()
                pinned_copies.watch()
            self._functions.enter()
            if self.changes.has_state:
                self.changes.enter()
        except Exception as error:
            raise self._lost(error) from error

    def leave(self) -> None:
        """Show everybody the shared state again.

        Raises:
            EngineLost: as `enter` does.
        """
        try:
            self._functions.leave()
            if self._copies:
                provenance.ignore()
                pinned_copies.ignore()
            if self.changes.before or self.changes.has_state:
                self.changes.take_back()
            self.random.leave()
            self._modes.leave()
            if self._switches is not None:
                self._switches.leave()
                self.changes.names.update(self._switches.turned)
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> EngineLost:
        return EngineLost(f"request {self.request_id} cannot be kept apart: {named(error)}")

    def own(self, target: Target) -> Target:
        """The method that a call from this request means.

        That is `target` itself; in autocast or inference mode one that runs in these, and shares
        forwards with calls that do; or one that runs alone, in the request's own state: in other
        modes of torch (gradients, `with torch.device(...)`, a dispatch mode), where the request has
        turned a context variable, where the method draws from the global random numbers, and of a
        component that generates, while it does and once it has left a state of the request's own.

        Raises:
            PipelineFailed: other processes compute the component, too, and know of no such mode.
        """
        is_usual = self._modes.can_share and not self._functions.are_changed
        is_usual = is_usual and contextvars.copy_context() == self._variables
        is_usual = is_usual and (target.method != "generate" or target.spec is not None)
        if self.changes.has_state or self.changes.before:
            is_usual = not self.changes.has_own(target.module) and is_usual
        is_usual = is_usual and (id(target.module), target.method) not in self.drawing
        is_plain = not (is_autocast_on() or torch.is_inference_mode_enabled())
        if is_usual and is_in_half(target.module, self):
            return self._in_half(target)
        if is_usual and (is_plain or not computes_together(target.module)):
            return target if is_plain else self._in_modes(target, Modes.now())
        if computes_together(target.module):
            raise PipelineFailed(
                f"the request calls {target.component} with gradients, or in another mode of torch "
                "than usual, which the other ranks of context_parallel would not know of: serve "
                "this with context_parallel=1"
            )
        return replace(target, original=self._inside(target.original), is_exclusive=True)

    def _in_modes(self, target: Target, modes: Modes) -> Target:
        """The same method in these modes: calls made in them share forwards among themselves."""
        infers = torch.is_inference_mode_enabled()
        key = id(target), modes.autocast, infers
        if key not in self._in_other_modes:
            original = torch.inference_mode()(target.original) if infers else target.original
            if modes.autocast:
                original = modes.entered()(original)
            names = [f"autocast on {device} in {dtype}" for device, dtype in modes.autocast]
            names += ["inference mode"] * infers
            selected = replace(target, original=original, modes=", ".join(names))
            self._in_other_modes[key] = selected
        return self._in_other_modes[key]

    def _in_half(self, target: Target) -> Target:
        """The same method of a module that has its float16 meanwhile: see `model.upcast`."""
        original = in_half([target.module])(target.original)
        spec = target.spec and replace(target.spec, casts=False)
        return replace(target, original=original, spec=spec, is_exclusive=True)

    def _inside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        variables = contextvars.copy_context()
        reported = writes.reporting(self.changes.touch_in_forward)(original)

        def method(*args: Any, **kwargs: Any) -> Any:
            with self.applied():
                return variables.run(reported, *args, **kwargs)

        return method

    def generating(self, component: nn.Module) -> AbstractContextManager[None]:
        """A component generates text, token by token, for the request."""
        return self.changes.generating(component)

    def is_generating(self, component: nn.Module) -> bool:
        return self.changes.is_generating(component)

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def free(self) -> None:
        """The request has ended."""
        if not self._is_free:
            self._is_free = True
            self.random.free()


def _nothing(_: Any) -> None:
    pass
