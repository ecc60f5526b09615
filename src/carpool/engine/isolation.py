"""Isolation of requests that share a ride: the private state of each while it runs.

A fiber's context keeps two kinds of state for its request across pauses: the global random numbers
(`random_state`) and torch's modes of the thread (`thread_modes`). A call in
modes other than the default runs alone, in these modes.

Other changes, of a shared module (`overlay`) or of a switch of the process (`switches`), are undone
when the request pauses, and recorded: such a request has to ride privately.
"""

import contextvars
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from carpool.engine import pinned_copies, random_state
from carpool.engine.containment import EngineLost
from carpool.engine.intercept import Target, computes_together
from carpool.engine.language.parts import WRITING
from carpool.engine.model.pins import Pins
from carpool.engine.model.upcast import HeldVae, in_half
from carpool.engine.overlay import writes
from carpool.engine.overlay.changes import Changes
from carpool.engine.overlay.shared_modules import SharedModules
from carpool.engine.patches import Patches
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
        self._installed: list[Patches] = []
        self._drawing: set[tuple[int, str]] = set()

    def install(self) -> None:
        self._shared.install()
        self._installed = [*writes.all_patches(), *self._pins.patches(), *self._patches]
        for patches in self._installed:
            patches.add()

    def note_modules(self) -> None:
        """Record modules that code outside of requests has added, such as layers of a LoRA."""
        self._shared.install()
        for patches in set(writes.all_patches()).difference(self._installed):
            patches.add()
            self._installed.append(patches)

    def remove(self) -> None:
        """Restore the process to its state before `install`. Harmless when not installed."""
        while self._installed:
            self._installed.pop().drop()
        self._shared.remove()

    def context(self, seed: int, *, has_switches: bool = False) -> "RequestContext":
        """Create the context of a request that is about to start.

        Args:
            has_switches: its code may change switches of the process.
        """
        random = RandomState(seed, self._device)
        # tensors on the CPU can be read without waiting: no need to track their copies
        is_copied = self._device.type != "cpu"
        changes, switches = Changes(self._shared), Switches() if has_switches else None
        return RequestContext(
            changes, random, self._pins, switches, self._drawing, copies=is_copied
        )

    def note_weights(self) -> bool:
        """Record the current weights as the model's, while no request runs.

        Returns:
            Whether they changed since the last record.
        """
        return bool(self._shared.changed_weights())

    def check_weights(self) -> None:
        """Check that the weights are unchanged since `note_weights`.

        Raises:
            EngineLost: a weight was written in place while requests ran, which nothing reports.
        """
        if names := self._shared.changed_weights():
            raise EngineLost(
                f"the weights of {', '.join(names)} were changed in place while requests ran, "
                "which cannot be undone (isolation=private runs such code one request at a time)"
            )


class RequestContext:
    """The private state of one request; see `fiber.FiberContext`."""

    is_private = is_running = is_abandoned = False
    # tokens that a component reads in one call, of those left
    prompt_part: Callable[[str, int], int] = staticmethod(lambda component, tokens: tokens)
    tell_share: Callable[[float], None]  # finished share of the work after the last step; if any
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
        self.generating, self.is_generating = changes.generating, changes.is_generating
        self.request_id, self.warnings = "", list[str]()  # its id; warnings for its answer
        self.names: Collection[str] = ()  # names of the arguments in its request
        self.note_texts: Callable[[Any], None] = ignore_texts  # called with the texts it tokenizes
        self.drawing = drawing  # (module id, method) that draw from the global random numbers
        self._modes = ThreadModes()
        self._switches = switches
        self._in_other_modes: dict[Hashable, Target] = {}
        self._variables = contextvars.copy_context()  # the context variables at the fiber's start
        self._is_free = False
        self._copies = copies  # copies from the host to an accelerator are tracked

    def enter(self) -> None:
        """Switch to the request's own state.

        Raises:
            EngineLost: it failed halfway: others might see a part of that state.
        """
        if self.is_abandoned:
            return
        try:
            if self._switches is not None:
                self._switches.enter()
            self.random.enter()
            if self._copies:
                pinned_copies.watch()
            self._modes.enter()  # a function mode may act on all that follows
            if self.changes.has_state:
                self.changes.enter()
        except Exception as error:
            raise self._lost(error) from error

    def leave(self) -> None:
        """Switch back to the shared state.

        Raises:
            EngineLost: as in `enter`.
        """
        if self.is_abandoned:
            return
        try:
            self._modes.leave()
            if self._copies:
                pinned_copies.ignore()
            if self.changes.before or self.changes.has_state:
                self.changes.take_back()
            self.random.leave()
            if self._switches is not None:
                self._switches.leave()
                self.changes.names.update(self._switches.turned)
        except Exception as error:
            raise self._lost(error) from error

    def abandon(self) -> None:
        """Restore what is the process's, on another thread: the request's own is stuck."""
        self.is_abandoned = True
        if self.random.abandon() and self._switches is not None:
            self._switches.leave()

    def _lost(self, error: Exception) -> EngineLost:
        return EngineLost(f"request {self.request_id} cannot be kept apart: {named(error)}")

    def own(self, target: Target) -> Target:
        """The target that a call from this request runs.

        Usually `target` itself. In autocast or inference mode: a copy that runs in these modes and
        shares forwards with such calls. A copy that runs alone, in the request's own state: in
        other torch modes (gradients, `with torch.device(...)`, a dispatch mode), after a change of
        a context variable, for a method that draws from the global random numbers, and for a
        component during text generation, or with state of the request left on it.

        Raises:
            PipelineFailed: other processes also compute the component, and cannot enter such modes.
        """
        is_usual = self._modes.can_share and contextvars.copy_context() == self._variables
        is_usual = is_usual and (target.method not in WRITING or target.spec is not None)
        if self.changes.has_state or self.changes.before:
            is_usual = not self.changes.has_own(target.module) and is_usual
        is_usual = is_usual and (id(target.module), target.method) not in self.drawing
        is_plain = not (is_autocast_on() or torch.is_inference_mode_enabled())
        if is_usual and isinstance(target.module, HeldVae) and target.module.is_in_half(self):
            return self._in_half(target)
        if is_usual and (is_plain or not computes_together(target.module)):
            return target if is_plain else self._in_modes(target, Modes.now())
        if computes_together(target.module):
            raise PipelineFailed(
                f"the request calls {target.component} with gradients, or in another torch mode "
                "than usual, which the other ranks of context_parallel cannot follow: serve "
                "this with context_parallel=1"
            )
        return replace(target, original=self._inside(target.original), is_exclusive=True)

    @property
    def reads_in_parts(self) -> bool:
        """Whether a language model may read a prompt in several calls."""
        if is_autocast_on() or torch.is_inference_mode_enabled():
            return False
        return self._modes.can_share and contextvars.copy_context() == self._variables

    def _in_modes(self, target: Target, modes: Modes) -> Target:
        """The same method in these modes; calls in equal modes share forwards."""
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
        """The same method of a module that is temporarily in float16: see `model.upcast`."""
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

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def free(self) -> None:
        """Release resources at the end of the request."""
        if not self._is_free:
            self._is_free = True
            self.random.free()


def ignore_texts(_: Any) -> None:
    """The default of `note_texts`."""
