"""Copy-on-write for modules: what a request writes on a shared module is seen by itself alone.

Pipelines may change shared modules in the middle of a call: attention processors, config entries,
attributes, hooks, number types. While an engine runs, the methods of `nn.Module` through which
Python code does so report to the fiber they run in. An `Overlay` keeps what its request changed,
and puts the modules back whenever the request's fiber pauses or ends.

Source: copy-on-write, as in `fork`; here the unit is one module's own attributes, children,
hooks and the storage that its parameters point to.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import HookRegistry
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

from carpool.engine.fiber import current_context
from carpool.engine.patches import Patches

_ABSENT = object()
_CONTAINERS = (dict, OrderedDict, list, set)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_REGISTRY = "_diffusers_hook"


class SharedModules:
    """The modules of one pipeline, whose writes by fibers are noticed."""

    def __init__(self, components: Mapping[str, nn.Module]) -> None:
        """
        Args:
            components: the pipeline's modules by their names in it.
        """
        self._components = dict(components)
        # forwards leave hooks and caches behind, which `remove` takes away
        self._before = [
            _State.of(module, with_storage=False)
            for component in components.values()
            for module in component.modules()
        ]
        self._registries: list[nn.Module] = []
        self.names: dict[int, str] = {}  # "transformer.blocks.0", by id of the module
        self.owners: dict[int, set[int]] = {}  # ids of the components that it is part of
        self.children: dict[int, dict[str, nn.Module | None]] = {}
        self.configs: dict[int, nn.Module] = {}  # whose config it is, by id of the config
        self._alive: list[nn.Module] = []  # so that ids stay theirs

    def install(self) -> None:
        """Notice writes from now on."""
        for name, component in self._components.items():
            for inner, module in component.named_modules():
                self.names.setdefault(id(module), f"{name}.{inner}" if inner else name)
                self.owners.setdefault(id(module), set()).add(id(component))
                self.children[id(module)] = dict(module._modules)
                if isinstance(config := vars(module).get("_internal_dict"), FrozenDict):
                    self.configs[id(config)] = module
                self._alive.append(module)
            # made at the first `cache_context` otherwise, which is no change of anything
            if isinstance(component, CacheMixin) and not hasattr(component, _REGISTRY):
                HookRegistry.check_if_exists_or_initialize(component)
                self._registries.append(component)
        for patches in _patches:
            patches.add()

    def remove(self) -> None:
        """Notice no more, and make all modules what they were. Harmless when not installed."""
        if not self._alive:
            return
        while self._registries:
            module = self._registries.pop()
            if not getattr(module, _REGISTRY).hooks:
                delattr(module, _REGISTRY)
        for known in (self.names, self.owners, self.children, self.configs, self._alive):
            known.clear()
        for patches in _patches:
            patches.drop()
        for state in self._before:
            state.restore()


class Overlay:
    """The changes that one request made to shared modules."""

    def __init__(self, shared: SharedModules) -> None:
        self._shared = shared
        self._touched: dict[int, _Touched] = {}
        self.changed: dict[str, None] = {}  # names of modules that were ever changed, in order

    def touch(self, what: Any, *, deep: bool = False) -> None:
        """Remember how a module is, before the request writes on it (or its config) first."""
        module = self._shared.configs.get(id(what), what)
        if not isinstance(module, nn.Module):
            return
        for one in module.modules() if deep else (module,):
            if id(one) in self._shared.names and id(one) not in self._touched:
                before = _State.of(one, self._shared.children[id(one)])
                self._touched[id(one)] = _Touched(one, before)

    def covers(self, component: nn.Module) -> bool:
        """Whether the request has changed this component, or a module inside of it."""
        return any(
            id(component) in self._shared.owners[known] and one.is_changed
            for known, one in self._touched.items()
        )

    def apply(self) -> None:
        """Show the request its own modules."""
        for one in self._touched.values():
            one.before = _State.of(one.module)  # others may have changed what they share meanwhile
            assert one.mine is not None, "an overlay is applied twice"
            one.mine.restore()

    def withdraw(self) -> None:
        """Show everybody the shared modules again."""
        for known, one in list(self._touched.items()):
            if not one.is_changed:
                del self._touched[known]
                continue
            self.changed[self._shared.names[known]] = None
            one.mine = _State.of(one.module)
            one.before.restore()


@dataclass(slots=True)
class _Touched:
    module: nn.Module
    before: "_State"
    mine: "_State | None" = None

    @property
    def is_changed(self) -> bool:
        return not self.before.is_now()


@dataclass(slots=True)
class _State:
    """What a module holds itself: the entries of its containers, and its parameters' storage."""

    dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    others: list[tuple[Any, list[Any]]] = field(default_factory=list)  # lists and sets
    parameters: list[tuple[nn.Parameter, Tensor, bool]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        children: Mapping[str, Any] | None = None,
        *,
        with_storage: bool = True,
    ) -> "_State":
        """
        Args:
            with_storage: keep what the parameters point to, too.
            children: those that it had when the engine began: diffusers takes one out of the
                dictionary itself before it sets an attention processor.
        """
        state = cls()
        for container in _containers(module):
            if isinstance(container, dict):
                entries = dict(container)
                if (
                    container is module._modules
                    and children
                    and not children.keys() <= entries.keys()
                ):
                    entries = dict(children) | entries
                state.dicts.append((container, entries))
            else:
                state.others.append((container, list(container)))
        for parameter in module._parameters.values():
            if parameter is not None and with_storage:
                entry = (parameter, parameter.data, parameter.requires_grad)
                state.parameters.append(entry)
        return state

    def is_now(self) -> bool:
        """Whether the module is as it was then."""
        return (
            all(_are_same(now, then) for now, then in self.dicts)
            and all(_has_same(now, then) for now, then in self.others)
            and all(
                parameter.requires_grad == flag and _is_same_storage(parameter.data, data)
                for parameter, data, flag in self.parameters
            )
        )

    def restore(self) -> None:
        """Make the module as it was then; other threads may read it meanwhile."""
        for place, (container, entries) in enumerate(self.dicts):
            for name in [name for name in container if name not in entries]:
                del container[name]
            for name, value in entries.items():
                if container.get(name, _ABSENT) is not value:
                    container[name] = value
            if place and list(container) != list(entries):  # the order of children means something
                for name, value in entries.items():
                    del container[name]
                    container[name] = value
        for other, values in self.others:
            if not _has_same(other, values):
                other.clear()
                (other.extend if isinstance(other, list) else other.update)(values)
        for parameter, data, flag in self.parameters:
            if not _is_same_storage(parameter.data, data):
                parameter.data = data
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


def _containers(module: nn.Module) -> Iterator[Any]:
    for holder in (module, vars(module).get(_REGISTRY)):
        if holder is not None:
            yield vars(holder)
            yield from (one for one in vars(holder).values() if type(one) in _CONTAINERS)
    if isinstance(config := vars(module).get("_internal_dict"), FrozenDict):
        yield config
        yield vars(config)


def _has_same(container: Any, values: list[Any]) -> bool:
    return len(container) == len(values) and all(map(_is_same, container, values))


def _are_same(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return len(now) == len(then) and all(
        _is_same(value, now.get(name, _ABSENT)) for name, value in then.items()
    )


def _is_same(left: Any, right: Any) -> bool:
    """The same object, or plain values that are equal."""
    if left is right:
        return True
    return type(left) is type(right) and isinstance(left, _PLAIN) and bool(left == right)


def _is_same_storage(left: Tensor, right: Tensor) -> bool:
    if left is right:
        return True
    if (left.dtype, left.device, left.shape) != (right.dtype, right.device, right.shape):
        return False
    try:
        return left.data_ptr() == right.data_ptr()
    except RuntimeError:  # of a quantized kind, without storage of its own
        return True


def _reporting(plain: Callable[..., Any], *, deep: bool = False) -> Callable[..., Any]:
    """A method that tells the fiber which calls it of the write."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is not None:
            context.overlay.touch(self, deep=deep)
        return plain(self, *args, **kwargs)

    return method


_WRITERS = (
    *("__setattr__", "__delattr__", "_apply", "add_module"),
    *(name for name in vars(nn.Module) if name.startswith("register_")),
)
# On the class: an own class for each module would fail where libraries ask for `type(module)`.
_patches = (
    Patches(
        nn.Module,
        dict.fromkeys(_WRITERS, _reporting)
        | dict.fromkeys(
            ("requires_grad_", "load_state_dict"), functools.partial(_reporting, deep=True)
        ),
    ),
    Patches(FrozenDict, dict.fromkeys(("__setattr__", "__setitem__"), _reporting)),
)
