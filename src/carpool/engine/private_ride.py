"""Private rides: a request runs alone on the user's own pipeline, as plain diffusers would run it.

Other requests wait from its start to its end, so its state needs no isolation while it runs: its
forwards run inside its fiber, within the modes, locks and swapped weights that its code has set
up. At its end a guard restores the pipeline, its modules, and the state of code on these modules
as loaded.
"""

import gc
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carpool.engine.containment import EngineLost
from carpool.engine.foreign_code import is_of_a_library
from carpool.engine.intercept import Target
from carpool.engine.isolation import ignore_texts
from carpool.engine.model.upcast import in_half
from carpool.engine.overlay.module_state import USUAL, ModuleState, is_same
from carpool.engine.overlay.writes import data
from carpool.engine.random_state import RandomState
from carpool.engine.reach.objects import HOOKS, own_dict, package
from carpool.engine.switches import Switches
from carpool.engine.thread_modes import ThreadModes

MAX_OBJECTS = 20_000  # saved by a guard; objects beyond them keep a request's changes
MAX_TENSOR_BYTES = 2**20  # the largest tensor whose values are saved for any model
MAX_WEIGHT_BYTES = 2**28  # models with at most this total of weights have all values saved
_CONTAINERS: Any = (OrderedDict, dict, list, set, deque)
_OPAQUE = (str, bytes, int, float, type(None), ModuleType)
_ARRAYS = (Tensor, np.ndarray)
_STREAMS = {random.Random: "state", torch.Generator: "_state", np.random.RandomState: "_state"}


class PrivateContext:
    """The state that a private ride saves at its start and restores at its end; see `FiberContext`.

    Args:
        pipe: the user's own pipeline.
        modules: its modules by name.
        seed: seeds the process's random numbers for the ride.
    """

    pins = watch = None
    tell_share: Callable[[float], None]  # as of `RequestContext`
    is_private, reads_in_parts, is_abandoned = True, False, False

    def __init__(
        self, pipe: Any, modules: Mapping[str, nn.Module], seed: int, device: torch.device
    ) -> None:
        guard, self._seed = Guard(pipe, modules), seed
        if hasattr(pipe, "set_progress_bar_config"):
            config = getattr(pipe, "_progress_bar_config", {})
            pipe.set_progress_bar_config(**{**config, "disable": True})
        self.random, self._switches = RandomState(seed, device), Switches()
        self.request_id, self.warnings = "", list[str]()
        self.names, self.note_texts = set[str](), ignore_texts
        self.is_running = False  # inside a forward: calls of modules do not park
        self._has_begun = False
        self._generating = list[nn.Module]()
        self._undo = ExitStack()
        self._undo.callback(guard.restore)
        self._undo.enter_context(in_half(modules.values()))
        self._undo.callback(self.random.free)

    def enter(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin()

    def leave(self) -> None:
        """Do nothing: no other fiber runs while this one is paused."""

    def own(self, target: Target) -> Target:
        return target

    @contextmanager
    def generating(self, component: nn.Module) -> Iterator[None]:
        """Mark a component as generating text; its state is restored at the end of the ride."""
        self._generating.append(component)
        try:
            yield
        finally:
            self._generating.pop()

    def is_generating(self, component: nn.Module) -> bool:
        return any(component is module for module in self._generating)

    def free(self) -> None:
        """Restore the saved state at the end of the request."""
        self._undo.close()

    def abandon(self) -> None:
        """Restore what is the process's, on another thread: the request's own is stuck."""
        self.is_abandoned = True
        if self.random.abandon():
            self._switches.leave()

    def _begin(self) -> None:
        for state in (self._switches, ThreadModes(), self.random):
            state.enter()
            self._undo.callback(self._leave, state)

    def _leave(self, state: Switches | ThreadModes | RandomState) -> None:
        if not self.is_abandoned:
            state.leave()


class Guard:
    """The saved state of a pipeline, its helpers, its modules, and the code on these modules."""

    def __init__(self, pipe: Any, modules: Mapping[str, nn.Module]) -> None:
        parts = [part for module in modules.values() for part in module.modules()]
        tensors = {
            id(tensor): tensor
            for part in parts
            for values in (part._parameters, part._buffers, vars(part))
            for tensor in values.values()
            if isinstance(tensor, Tensor) and _is_plain(tensor)
        }.values()
        is_small = sum(tensor.nbytes for tensor in tensors) <= MAX_WEIGHT_BYTES
        limit = MAX_WEIGHT_BYTES if is_small else MAX_TENSOR_BYTES
        self._versions = [(tensor, tensor._version) for tensor in tensors if tensor.nbytes > limit]
        self._undo: list[Callable[[], object]] = [ModuleState.of(part).restore for part in parts]
        code = [v for part in parts for n, v in vars(part).items() if n not in USUAL or n in HOOKS]
        reached = _reached([pipe, *map(type, parts), *code], set(map(id, parts)))
        saved = (*(tensor for tensor in tensors if tensor.nbytes <= limit), *reached)
        self._undo += filter(None, map(_saved, saved))

    def restore(self) -> None:
        """Restore the whole state.

        Raises:
            EngineLost: values of large weights were written in place; all else is restored.
        """
        with ExitStack() as undo:  # a failure does not end the others
            for restore in reversed(self._undo):
                undo.callback(restore)
        if any(tensor._version != version for tensor, version in self._versions):
            raise EngineLost("a request has changed large weights in place: this stays")


def _reached(roots: Iterable[Any], module_ids: set[int]) -> Iterator[Any]:
    """Yield the objects that others reach, without modules, large tensors and Carpool's own."""
    waiting, visited = deque(roots), dict[int, Any]()
    while waiting and len(visited) < MAX_OBJECTS:
        value = waiting.popleft()
        if isinstance(value, _OPAQUE) or id(value) in visited or id(value) in module_ids:
            continue
        visited[id(value)] = value
        is_large = isinstance(value, _ARRAYS) and value.nbytes > MAX_TENSOR_BYTES
        if not is_large and package(type(value)) != "carpool":
            yield value
            waiting.extend(_inner(value))


def _inner(value: Any) -> list[Any]:
    is_code = isinstance(value, (type, FunctionType))
    is_known = is_code and (is_of_a_library(value) or package(value) in sys.stdlib_module_names)
    if isinstance(value, _ARRAYS) or is_known:
        return []
    if isinstance(value, type):
        return [*vars(value).values(), *value.__bases__]
    if isinstance(value, FunctionType):  # without its globals
        cells, defaults = value.__closure__ or (), (value.__defaults__, value.__kwdefaults__)
        return [*cells, *defaults, value.__dict__]
    return [own_dict(value), *gc.get_referents(value)]


def _saved(value: Any) -> Callable[[], object] | None:
    """Save an object's own state; returns the function that restores it, or None."""
    if isinstance(value, Tensor):
        values = data(value).clone() if _is_plain(value) else data(value)
        return lambda: torch.equal(data(value), values) or data(value).copy_(values)
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy()) if value.flags.writeable else None
    if isinstance(value, CellType):
        contents = gc.get_referents(value)  # an empty cell has none
        return partial(setattr, value, "cell_contents", *contents) if contents else None
    if isinstance(value, type):
        return None if is_of_a_library(value) else partial(_set_class, value, dict(vars(value)))
    if base := next((cls for cls in _CONTAINERS if isinstance(value, cls)), None):
        entries = dict(base.items(value)) if issubclass(base, dict) else list(value)
        return partial(_fill, base, value, entries)
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if name := _STREAMS.get(type(value)):
        return partial(getattr(value, f"set{name}"), getattr(value, f"get{name}")())
    state: Any = None if is_of_a_library(type(value)) else object.__getstate__(value)
    slots = state[1].items() if isinstance(state, tuple) else ()
    put = object.__setattr__
    return lambda: [put(value, n, v) for n, v in slots if getattr(value, n, None) is not v]


def _fill(base: Any, container: Any, entries: Any) -> None:
    """Restore the entries of a container, without the methods of its own class."""
    if is_same(container, entries):
        return
    base.clear(container)
    if isinstance(entries, dict):
        for name, entry in entries.items():
            base.__setitem__(container, name, entry)
    else:
        (base.update if base is set else base.extend)(container, entries)


def _set_class(cls: type, attributes: Mapping[str, Any]) -> None:
    for name in vars(cls).keys() - attributes.keys():
        type.__delattr__(cls, name)
    for name, value in attributes.items():
        if vars(cls).get(name) is not value:
            type.__setattr__(cls, name, value)


def _is_plain(tensor: Tensor) -> bool:
    return not (tensor.is_inference() or tensor.is_meta or tensor.is_quantized)
