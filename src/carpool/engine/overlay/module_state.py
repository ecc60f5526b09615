"""The state of one module, without its children's: saved, compared and restored."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

from carpool.engine.overlay.writes import data, point
from carpool.engine.probation.snapshot import versions

REGISTRY = "_diffusers_hook"  # diffusers' attribute for its hooks
ABSENT = object()
_CONTAINERS = (dict, OrderedDict, list, set)
USUAL = frozenset(vars(nn.Module()))  # attributes of every module
_NO_OBJECTS = (nn.Module, Tensor, FrozenDict, type, ModuleType, FunctionType, MethodType, partial)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(slots=True)
class ModuleState:
    """The state of one module: class, entries of its containers, storage of weights and buffers."""

    module: nn.Module
    kind: type  # its class, which a parametrization exchanges
    dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    collections: list[tuple[Any, list[Any]]] = field(default_factory=list)  # lists and sets
    tensors: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)

    @classmethod
    def of(
        cls, module: nn.Module, children: Mapping[str, Any] | None = None, *,
        with_storage: bool = True,
    ) -> "ModuleState":  # fmt: skip
        """
        Args:
            with_storage: keep the storage of weights and buffers, too.
            children: its children at the engine's start: diffusers removes one from the
                dictionary itself before it sets an attention processor.
        """
        state = cls(module, type(module))
        for container in _containers(module):
            if isinstance(container, dict):
                entries = dict(container)
                at_load = children if container is module._modules and children else {}
                if not at_load.keys() <= entries.keys():
                    entries = dict(at_load) | entries
                state.dicts.append((container, entries))
            else:
                state.collections.append((container, list(container)))
        if with_storage:
            state.keep_weights(module)
        return state

    def keep_weights(self, module: nn.Module) -> None:
        """Save the storages of its weights and buffers, once."""
        if not self.tensors:
            self.tensors = [
                (tensor, data(tensor), tensor.requires_grad)
                for tensor in (*module._parameters.values(), *module._buffers.values())
                if tensor is not None
            ]

    def is_now(self) -> bool:
        """Whether the module still has the saved state."""
        return all(_are_same(now, then) for now, then in self.dicts) and self.is_same_but_entries()

    def is_same_but_entries(self) -> bool:
        """Whether at most entries of its dictionaries differ from the saved state."""
        are_same = all(_has_same(now, then) for now, then in self.collections)
        return (
            are_same
            and type(self.module) is self.kind
            and all(
                tensor.requires_grad == flag and _is_same_storage(data(tensor), then)
                for tensor, then, flag in self.tensors
            )
        )

    def restore(self) -> None:
        """Restore the module's state; other threads may read it at the same time."""
        if type(self.module) is not self.kind:
            object.__setattr__(self.module, "__class__", self.kind)
        for place, (container, entries) in enumerate(self.dicts):
            for name in [name for name in container if name not in entries]:
                del container[name]
            for name, value in entries.items():
                if container.get(name, ABSENT) is not value:
                    container[name] = value
            if place and list(container) != list(entries):  # children are ordered
                for name, value in entries.items():
                    del container[name]
                    container[name] = value
        for collection, values in self.collections:
            if not _has_same(collection, values):
                collection.clear()
                (collection.extend if isinstance(collection, list) else collection.update)(values)
        for tensor, then, flag in self.tensors:
            if not _is_same_storage(data(tensor), then):
                point(tensor, then)
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)


class TreeState:
    """The state of a module and all its parts, for comparison only, which takes a fraction."""

    def __init__(self, module: nn.Module, *, with_storage: bool) -> None:
        self._parts, self._buffers = list(module.modules()), list(module.buffers())
        self._containers = [c for part in self._parts for c in _containers(part)]
        self._values = [dict.values(c) for c in self._containers if isinstance(c, dict)]
        self._weights = [*module.parameters(), *self._buffers] if with_storage else []
        self._before = self._read()

    def is_now(self) -> bool:
        """Whether the module and its parts still have this state."""
        facts, entries = self._read()
        return facts == self._before[0] and _has_same(entries, self._before[1])

    def _read(self) -> tuple[list[Any], list[Any]]:
        facts = [*map(type, self._parts), *map(len, self._containers)]
        facts += [*map(_address, self._weights), *versions(self._buffers)]
        # names of dictionaries, entries of lists and sets; then values of dictionaries
        return facts, [*chain.from_iterable(self._containers + self._values)]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a quantized tensor has no storage
        return 0


def own_containers(module: nn.Module) -> Iterator[Any]:
    """The lists, dictionaries and sets that a module holds, and those of its plain objects.

    Attributes common to all modules are left out: `writes` reports their changes.
    """
    for name, value in vars(module).items():
        if name in USUAL or name == REGISTRY:
            continue
        if type(value) in _CONTAINERS:
            yield value
        elif (inner := _attributes(value)) is not None:  # an attention processor, a config, ...
            yield inner
            yield from (entry for entry in inner.values() if type(entry) in _CONTAINERS)


def _attributes(value: Any) -> dict[str, Any] | None:
    attributes = getattr(value, "__dict__", None)
    is_plain = type(attributes) is dict and not isinstance(value, _NO_OBJECTS)
    return attributes if is_plain else None


def _containers(module: nn.Module) -> Iterator[Any]:
    yield from own_containers(module)
    for holder in (module, vars(module).get(REGISTRY)):
        if holder is not None:
            yield vars(holder)
            yield from (value for value in vars(holder).values() if type(value) in _CONTAINERS)
            yield from (vars(hook) for hook in getattr(holder, "_fn_refs", ()))  # diffusers' hooks
    if isinstance(config := vars(module).get("_internal_dict"), FrozenDict):
        yield config
        yield vars(config)


def is_same(container: Any, copy: Any) -> bool:
    """Whether a container is equal to its copy."""
    return (_are_same if isinstance(container, dict) else _has_same)(container, copy)


def _has_same(container: Any, values: list[Any]) -> bool:
    if len(container) != len(values):
        return False
    return all(map(is_, container, values)) or all(map(_is_same, container, values))


def _are_same(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return len(now) == len(then) and all(
        _is_same(value, now.get(name, ABSENT)) for name, value in then.items()
    )


def _is_same(value: Any, reference: Any) -> bool:
    """Whether two values are the same object, or equal plain values."""
    if value is reference:
        return True
    return type(value) is type(reference) and isinstance(value, _PLAIN) and bool(value == reference)


def _is_same_storage(storage: Tensor, reference: Tensor) -> bool:
    if storage is reference:
        return True
    forms = [(t.dtype, t.device, t.shape, _address(t)) for t in (storage, reference)]
    return forms[0] == forms[1]
