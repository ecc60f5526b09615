"""Isolation of requests in one process: the state that each has for itself while its pipeline runs.

A fiber's context makes three kinds of state private to its request, whatever runs between two of
its turns: the changes that it makes to shared modules (`overlay`), the global random numbers
(`random_state`), and torch's modes of the thread (gradients, inference mode, autocast, functions).

A call to a component that its request has changed cannot share a forward: it runs alone, inside
the request's own state. Which requests are like that is observed, not listed.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from carpool.engine import pinned_copies, provenance, random_state
from carpool.engine.containment import EngineLost
from carpool.engine.intercept import Target, computes_together
from carpool.engine.model.pins import Pins
from carpool.engine.overlay.functions import FunctionModes, WeightsWatch
from carpool.engine.overlay.overlay import Overlay
from carpool.engine.overlay.shared_modules import SharedModules
from carpool.engine.random_state import RandomState
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
        return RequestContext(overlay, random, self._pins, functions, copies=is_copied)

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

    def __init__(
        self,
        overlay: Overlay,
        random: RandomState,
        pins: Pins,
        functions: FunctionModes,
        *,
        copies: bool,
    ) -> None:
        self.overlay, self.random, self.pins = overlay, random, pins
        self._functions = functions
        self.request_id, self.warnings = "", list[str]()  # whose it is; what its answer is to say
        self.names: Collection[str] = ()  # of the arguments that its request has given
        self.note_texts: Callable[[Any], None] = _nothing  # called with what it tokenizes
        self._modes = self._outside = _PLAIN
        self._no_inference: torch.inference_mode | None = None
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
        self._outside = Modes.now()
        is_changed = self._modes is not self._outside
        if self._no_inference is not None:
            self._no_inference.__exit__(None, None, None)
            self._no_inference, is_changed = None, True
        if is_changed:
            self._modes.set()
        self.random.swap()
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
        self.random.swap()
        self._modes = Modes.now()
        is_changed = self._outside is not self._modes
        if torch.is_inference_mode_enabled():  # of a `with` that the fiber paused in
            self._no_inference = torch.inference_mode(mode=False)
            self._no_inference.__enter__()
            is_changed = True
        if is_changed:
            self._outside.set()

    def own(self, target: Target) -> Target:
        """The method that a call from this request means.

        That is `target` itself, or one that runs alone and in the request's own state: where the
        request has changed the component, where it wants gradients through it or a device of its
        own (`with torch.device(...)`), and where tokens are drawn from the global random numbers.

        Raises:
            PipelineFailed: other processes compute the component, too, and know of no change.
        """
        is_plain = not torch.is_grad_enabled() and target.method != "generate"
        is_plain = is_plain and not self._functions.are_changed
        if is_plain and not self.overlay.covers(target.module):
            return target
        if computes_together(target.module):
            raise PipelineFailed(
                f"the request changes {target.component} while it runs, or wants gradients through "
                "it, which the other ranks of context_parallel would not know of: serve this with "
                "context_parallel=1"
            )
        return replace(target, original=self._inside(target.original), is_exclusive=True)

    def _inside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            with self.applied(), self._functions.of_forward():
                return original(*args, **kwargs)

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


def _kinds_of_devices() -> tuple[str, ...]:
    known = torch.accelerator.current_accelerator()
    return ("cpu",) if known is None else ("cpu", known.type)


@dataclass(frozen=True, slots=True)
class Modes:
    """Torch's modes of the thread. By default those in which pipelines start."""

    has_grad: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # of devices for which it is on

    @classmethod
    def now(cls) -> "Modes":
        has_grad = torch.is_grad_enabled()
        on = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        if not (has_grad or on):
            return _PLAIN  # the usual case
        return cls(has_grad, tuple([(one, torch.get_autocast_dtype(one)) for one in on]))

    def set(self) -> None:
        torch.set_grad_enabled(self.has_grad)
        wanted = dict(self.autocast)
        for device in _DEVICES:
            torch.set_autocast_enabled(device, device in wanted)
            if device in wanted:
                torch.set_autocast_dtype(device, wanted[device])


_DEVICES = _kinds_of_devices()
_PLAIN = Modes()


def _nothing(_: Any) -> None:
    pass
