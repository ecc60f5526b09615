"""Private rides: a request runs alone on the user's own pipeline, as plain diffusers would run it.

Other requests wait from its start to its end, so its state needs no isolation while it runs: its
forwards run inside its fiber, within the modes, locks and swapped weights that its code has set
up. At its end a guard restores the pipeline, its modules, and the state of code on these modules
as loaded.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from carpool.engine.containment import EngineLost
from carpool.engine.foreign_code import foreign_parts, is_of_a_library
from carpool.engine.intercept import Target
from carpool.engine.isolation import ignore_texts
from carpool.engine.model.upcast import in_half
from carpool.engine.overlay.module_state import ModuleState, is_same
from carpool.engine.overlay.writes import data
from carpool.engine.random_state import RandomState
from carpool.engine.switches import Switches
from carpool.engine.thread_modes import ThreadModes

MAX_OBJECTS = 20_000  # saved by a guard; objects beyond them keep a request's changes
MAX_TENSOR_BYTES = 2**20  # the largest tensor whose values are saved for any model
MAX_WEIGHT_BYTES = 2**28  # models with at most this total of weights have all values saved
_CONTAINERS = (dict, list, set, deque)
_OPAQUE = (str, bytes, int, float, type(None), torch.Generator, ModuleType)


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
        self._parts = [ModuleState.of(part) for part in parts]
        small, large = _weights(parts)
        self._tensors = [(tensor, data(tensor).clone()) for tensor in small]
        self._versions = [(tensor, tensor._version) for tensor in large]
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        module_ids = {id(part) for part in parts}
        code = [code for module in modules.values() for code in foreign_parts(module)]
        code += {type(part): None for part in parts if not is_of_a_library(type(part))}
        for value in _reached([vars(pipe), *vars(pipe).values(), *code], module_ids):
            if isinstance(value, CellType):
                self._cells.append((value, _contents(value)))
            elif isinstance(value, Tensor):
                self._tensors.append((value, data(value).clone()))
            elif isinstance(value, type):
                self._classes.append((value, dict(vars(value))))
            else:
                self._containers.append((value, value.copy()))

    def restore(self) -> None:
        """Restore the whole state.

        Raises:
            EngineLost: values of large weights were written in place; all else is restored.
        """
        for state in self._parts:
            state.restore()
        for tensor, values in self._tensors:
            if not torch.equal(data(tensor), values):
                data(tensor).copy_(values)
        for cell, contents in self._cells:
            if contents is not _EMPTY:
                cell.cell_contents = contents
        for cls, attributes in self._classes:
            for name in vars(cls).keys() - attributes.keys():
                delattr(cls, name)
            for name, value in attributes.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
        for container, values in self._containers:
            if isinstance(container, (dict, list, set)) and is_same(container, values):
                continue
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(values)
        if any(tensor._version != version for tensor, version in self._versions):
            raise EngineLost("a request has changed large weights in place: this stays")


_EMPTY = object()


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _reached(roots: Iterable[Any], module_ids: set[int]) -> Iterator[Any]:
    """Yield the mutable containers, cells, classes and small tensors reachable from some objects.

    Args:
        module_ids: ids of modules that are guarded as modules.
    """
    waiting, visited = deque(roots), set[int]()
    while waiting and len(visited) < MAX_OBJECTS:
        value = waiting.popleft()
        if isinstance(value, _OPAQUE) or id(value) in visited or id(value) in module_ids:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            if _is_plain(value) and value.nbytes <= MAX_TENSOR_BYTES:
                yield value
        elif type(value) in _CONTAINERS:
            yield value
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, CellType):
            yield value
            waiting.append(_contents(value))
        elif isinstance(value, tuple):
            waiting.extend(value)
        elif isinstance(value, type):
            if not is_of_a_library(value):
                yield value
                waiting.extend(v for v in vars(value).values() if type(v) in _CONTAINERS)
        elif isinstance(value, FunctionType):
            waiting.extend((*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__))
        elif isinstance(value, MethodType):
            waiting.extend((value.__self__, value.__func__))
        elif type(attributes := getattr(value, "__dict__", None)) is dict:
            waiting.append(attributes)


def _weights(parts: Iterable[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, buffers and other tensors of modules: those with saved values, and the rest.

    Saved are all values of a small model, and the small tensors of a large one.
    """
    tensors = {
        id(tensor): tensor
        for part in parts
        for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
        if isinstance(tensor, Tensor) and _is_plain(tensor)
    }
    is_small = sum(tensor.nbytes for tensor in tensors.values()) <= MAX_WEIGHT_BYTES
    limit = MAX_WEIGHT_BYTES if is_small else MAX_TENSOR_BYTES
    small = [tensor for tensor in tensors.values() if tensor.nbytes <= limit]
    return small, [tensor for tensor in tensors.values() if tensor.nbytes > limit]


def _is_plain(tensor: Tensor) -> bool:
    return not (tensor.is_inference() or tensor.is_meta or tensor.is_quantized)
