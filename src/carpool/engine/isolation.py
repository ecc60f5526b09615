"""Isolation of requests in one process: the state that each has for itself while its pipeline runs.

A fiber's context makes four kinds of state private to its request, whatever runs between two of
its turns: the changes that it makes to shared modules (`overlay`), the global random numbers
(`random_state`), torch's modes of the thread (`thread_modes`), and switches of the process
(`switches`).

A call to a component that its request has changed cannot share a forward: it runs alone, inside
the request's own state. Which requests are like that is observed, not listed.
"""

import contextvars
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from carpool.engine import pinned_copies, provenance, random_state
from carpool.engine.containment import EngineLost
from carpool.engine.intercept import Target, computes_together
from carpool.engine.model.pins import Pins
from carpool.engine.model.upcast import in_half, is_in_half
from carpool.engine.overlay.functions import FunctionModes, WeightsWatch
from carpool.engine.overlay.overlay import Overlay
from carpool.engine.overlay.shared_modules import SharedModules
from carpool.engine.random_state import RandomState
from carpool.engine.switches import Switches
from carpool.engine.thread_modes import ThreadModes
from carpool.errors import PipelineFailed, named

log = logging.getLogger("carpool")


class Isolation:
    """Keeps the requests of one engine apart."""

    def __init__(self, components: Mapping[str, nn.Module], device: torch.device) -> None:
        self._shared, self._device = SharedModules(components), device
        self._pins = Pins(components.values())
        is_accelerator = device.type != "cpu"
        self._patches = [*random_state.PATCHES, *([pinned_copies.TO] if is_accelerator else [])]
        self._is_installed = False
        self._logged: set[str] = set()
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

    def context(self, seed: int, *, is_watched: bool = False) -> "RequestContext":
        """The state of a request that is about to start.

        Args:
            is_watched: what it does to weights by functions of torch is followed, too, and what it
                writes in lists and plain objects of modules.
        """
        random = RandomState(seed, self._device)
        # a tensor of the CPU can be read without waiting: nothing has to be known of it beforehand
        is_copied = self._device.type != "cpu"
        overlay = Overlay(self._shared, is_watched=is_watched)
        functions = FunctionModes(*([WeightsWatch(overlay)] if is_watched else []))
        switches = Switches() if is_watched else None
        return RequestContext(
            overlay, random, self._pins, functions, switches, self._drawing, copies=is_copied
        )

    def exclusive(self, context: "RequestContext") -> list[str]:
        """The components that a request has changed for itself; each kind is logged once."""
        names = list(context.overlay.changed)
        for name in names:
            if name not in self._logged:
                self._logged.add(name)
                log.warning(
                    "a request changes %s while it runs: the change is its own, and its calls to "
                    "that component run alone",
                    name,
                )
        return sorted({name.partition(".")[0] for name in names})

    def check_weights(self, request_id: str) -> None:
        """Look after the end of a request whether the weights are still those that were loaded."""
        for name in self._shared.changed_weights():
            log.error(
                "weights of %s were changed in place, where nothing reports it; it was noticed at "
                "the end of request %s and cannot be undone: later answers differ from those of "
                "the model. Load it anew, and keep the pipeline from writing on its weights",
                name,
                request_id,
            )


class RequestContext:
    """The private state of one request; see `fiber.FiberContext`."""

    is_private = is_running = False

    def __init__(
        self,
        overlay: Overlay,
        random: RandomState,
        pins: Pins,
        functions: FunctionModes,
        switches: Switches | None,
        drawing: set[tuple[int, str]],
        *,
        copies: bool,
    ) -> None:
        self.overlay, self.random, self.pins = overlay, random, pins
        self._functions = functions
        self.request_id, self.warnings = "", list[str]()  # whose it is; what its answer is to say
        self.names: Collection[str] = ()  # of the arguments that its request has given
        self.note_texts: Callable[[Any], None] = _nothing  # called with what it tokenizes
        self.drawing = drawing  # modules and methods that draw from the global random numbers
        self._modes = ThreadModes()
        self._switches = switches
        self._inferring: dict[int, Target] = {}  # by the id of the ordinary one
        self._variables = contextvars.copy_context()  # as a fiber begins with them
        self._is_free = False
        self._copies = copies  # from the host to an accelerator

    def enter(self) -> None:
        """Show the request its own state.

        Raises:
            EngineLost: it cannot be done as a whole: others might see a part of that state.
        """
        try:
            self._enter()
        except Exception as error:
            raise self._lost(error) from error

    def leave(self) -> None:
        """Show everybody the shared state again.

        Raises:
            EngineLost: as `enter` does.
        """
        try:
            self._leave()
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> EngineLost:
        return EngineLost(f"request {self.request_id} cannot be kept apart: {named(error)}")

    def _enter(self) -> None:
        if self._switches is not None:
            self._switches.enter()
        self._modes.enter()
        self.random.enter()
        if self._copies:
            provenance.watch()
            pinned_copies.watch()
        self.overlay.apply()
        self._functions.enter()

    def _leave(self) -> None:
        self._functions.leave()
        if self._copies:
            provenance.ignore()
            pinned_copies.ignore()
        self.overlay.withdraw()
        self.random.leave()
        self._modes.leave()
        if self._switches is not None:
            self._switches.leave()

    def own(self, target: Target) -> Target:
        """The method that a call from this request means.

        That is `target` itself, or one that runs alone and in the request's own state: where the
        request has changed the component, where torch is in other modes than usual (gradients,
        autocast, `with torch.device(...)`, a dispatch mode), where it has turned a switch of the
        process or a context variable, and where it draws from the global random numbers.

        Raises:
            PipelineFailed: other processes compute the component, too, and know of no change.
        """
        is_usual = self._modes.are_usual and not self._functions.are_changed
        is_usual = is_usual and contextvars.copy_context() == self._variables
        is_usual = is_usual and not (self._switches and self._switches.are_turned)
        is_usual = is_usual and target.method != "generate"
        is_usual = is_usual and (id(target.module), target.method) not in self.drawing
        if is_usual and is_in_half(target.module, self):
            return self._in_half(target)
        if is_usual and not self.overlay.covers(target.module):
            return self._in_inference(target) if torch.is_inference_mode_enabled() else target
        if computes_together(target.module):
            raise PipelineFailed(
                f"the request changes {target.component} while it runs, or wants gradients through "
                "it, which the other ranks of context_parallel would not know of: serve this with "
                "context_parallel=1"
            )
        return replace(target, original=self._inside(target.original), is_exclusive=True)

    def _in_inference(self, target: Target) -> Target:
        """The same method in inference mode: calls made in that share forwards among themselves."""
        if id(target) not in self._inferring:
            original = torch.inference_mode()(target.original)
            self._inferring[id(target)] = replace(target, original=original, in_inference=True)
        return self._inferring[id(target)]

    def _in_half(self, target: Target) -> Target:
        """The same method of a module that has its float16 meanwhile: see `model.upcast`."""
        original = in_half([target.module])(target.original)
        spec = target.spec and replace(target.spec, casts=False)
        return replace(target, original=original, spec=spec, is_exclusive=True)

    def _inside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        variables = contextvars.copy_context()

        def method(*args: Any, **kwargs: Any) -> Any:
            with self.applied(), self._functions.of_forward():
                return variables.run(original, *args, **kwargs)

        return method

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
