"""The changes that one request makes to shared modules: detected, and undone when it pauses.

Pipelines may change shared modules in the middle of a call: attention processors, config entries,
attributes, hooks, dtypes. `writes` reports the write, and no other request runs until the next
pause, where the modules are restored; so no other request sees the change.

Language models store state of the text in progress on themselves, from token to token: image
positions, the prompt's length. Such changes, on components that generate for a request, are
private to it: they are applied again whenever it continues.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from carpool.engine.overlay.module_state import ABSENT, ModuleState, is_same
from carpool.engine.overlay.shared_modules import SharedModules


@dataclass(slots=True)
class OwnEntry:
    """An entry of a module's dictionary with a private value for a request."""

    container: dict[Any, Any]
    name: Any
    private: Any
    shared: Any

    def show(self, value: Any) -> None:
        if value is ABSENT:
            self.container.pop(self.name, None)
        else:
            self.container[self.name] = value


class Changes:
    """The changes of one request. For the engine's thread."""

    def __init__(self, shared: SharedModules) -> None:
        self._shared = shared
        self.before: dict[int, tuple[nn.Module, ModuleState]] = {}  # since the last pause, by id
        self.has_state = False  # whether it has private state: it has begun to generate
        self.names: dict[str, None] = {}  # names of changed modules, in order
        self._generating: dict[int, list[dict[str, Any]]] = {}  # configs of generating components
        self._configs: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # and saved entries
        self._parts: set[int] = set()  # ids of all modules of components that have generated
        self._private: dict[tuple[int, Any], OwnEntry] = {}  # keyed by dictionary id, and name
        self._changed: set[int] = set()  # ids of the modules with such entries
        self._hooked: set[int] = set()  # ids of the modules that it has hooked

    @contextmanager
    def generating(self, component: nn.Module) -> Iterator[None]:
        """Mark a component as generating: its changes are private to the request from now on."""
        configs = {id(c): vars(c) for p in component.modules() if (c := getattr(p, "config", None))}
        self._parts.update(map(id, component.modules()))
        before = self._generating.get(id(component))
        self._generating[id(component)] = list(configs.values())
        self.has_state = True
        self._watch()
        try:
            yield
        finally:
            if before is None:
                del self._generating[id(component)]

    def is_generating(self, component: nn.Module) -> bool:
        return id(component) in self._generating

    def has_own(self, component: nn.Module) -> bool:
        """Whether the request has private changes or hooks on this generating component."""
        for module_id, (module, state) in self.before.items():
            if _differs_in_hooks(module, state, is_hooked=module_id in self._hooked):
                for ids in (self._hooked, self._parts, self._changed):
                    ids.add(module_id)
                self.has_state = True
        if any(_differs(config, before) for config, before in self._configs.values()):
            self._changed |= self._parts
        return bool(self._changed) and not self._changed.isdisjoint(map(id, component.modules()))

    def enter(self) -> None:
        """Apply the request's private entries."""
        for entry in self._private.values():
            entry.shared = entry.container.get(entry.name, ABSENT)
            entry.show(entry.private)
        self._watch()

    def _watch(self) -> None:
        """Save the configs of generating components: writes on them are not reported."""
        for config in chain.from_iterable(self._generating.values()):
            self._configs.setdefault(id(config), (config, dict(config)))

    def touch(self, target: Any, *, deep: bool = False) -> None:
        """Save a module's state before the request's first write.

        Args:
            target: the module, its config, or one of its dictionaries of hooks.
            deep: its submodules may be written, too.
        """
        owner = self._shared.holders.get(id(target), target)
        if not isinstance(owner, nn.Module):
            return
        for module in owner.modules() if deep else [owner]:
            if id(module) in self._shared.names:
                self._save(module).keep_weights(module)

    def touch_in_forward(self, target: Any) -> None:
        """Like `touch`, in a forward: leaves out the weights, which may be streamed."""
        owner = self._shared.holders.get(id(target), target)
        if id(owner) in self._parts:
            self._save(owner)

    def _save(self, module: nn.Module) -> ModuleState:
        if id(module) not in self.before:
            children = self._shared.children.get(id(module))
            self.before[id(module)] = module, ModuleState.of(module, children, with_storage=False)
        return self.before[id(module)][1]

    def take_back(self) -> None:
        """Restore all modules; record changed ones in `names`, or as private entries."""
        for entry in self._private.values():
            entry.private = entry.container.get(entry.name, ABSENT)
        for module_id, (_, state) in self.before.items():
            if state.is_now():
                continue
            if module_id in self._parts and state.is_same_but_entries():
                self._changed.add(module_id)
                for container, before in state.dicts:
                    self._keep(container, before)
            else:
                self.names[self._shared.names[module_id]] = None
            state.restore()
        for config, before in self._configs.values():
            if _differs(config, before):
                self._keep(config, before)
        for entry in self._private.values():
            entry.show(entry.shared)
        self.before.clear()
        self._configs.clear()

    def _keep(self, container: dict[Any, Any], before: dict[Any, Any]) -> None:
        """Record the changed entries of a dictionary as private to the request."""
        for name in {**before, **container}:
            now, then = container.get(name, ABSENT), before.get(name, ABSENT)
            if now is not then:
                entry = OwnEntry(container, name, now, then)
                self._private.setdefault((id(container), name), entry).private = now


def _differs(config: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(config) != len(before) or not all(map(is_, config.values(), before.values()))


def _differs_in_hooks(module: nn.Module, state: ModuleState, *, is_hooked: bool) -> bool:
    """Whether forward hooks are the only difference, and all are of diffusers' own code.

    Qwen-Image-2.1 hooks its text encoder during the call: the hook is private to the request.
    """
    hooks = [id(value) for name, value in vars(module).items() if name.startswith("_forward_")]
    changed = [(now, then) for now, then in state.dicts if not is_same(now, then)]
    if not changed or any(id(now) not in hooks for now, _ in changed):
        return False
    added = [now[name] for now, then in changed for name in now.keys() - then.keys()]
    names = [getattr(hook, "__module__", "diffusers.") for hook in added]
    return bool(added or is_hooked) and all(name.startswith("diffusers.") for name in names)
