"""The changes that one request makes to shared modules: noticed, and taken back when it pauses.

Pipelines may change shared modules in the middle of a call: attention processors, config entries,
attributes, hooks, number types. No other request runs between the write, which `writes` reports,
and the next pause, where the modules are restored; so no other request sees any of it.

Language models keep on themselves, from token to token, what belongs to the text that they write:
the places of pictures, the length of the prompt. Such changes, of components that a request lets
generate, are its own: they are put back whenever it goes on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from carpool.engine.overlay.module_state import ModuleState
from carpool.engine.overlay.shared_modules import SharedModules


class Changes:
    """The changes of one request. For the engine's thread."""

    def __init__(self, shared: SharedModules) -> None:
        self._shared = shared
        self._before: dict[int, tuple[nn.Module, ModuleState]] = {}  # by the module's id
        self.names: dict[str, None] = {}  # names of changed modules, in order
        self._is_written = False
        self._generating: dict[int, list[nn.Module]] = {}  # parts with a config, by component
        self._parts: set[int] = set()  # ids of all modules of components that have generated
        self._own: dict[int, tuple[nn.Module, ModuleState]] = {}  # the request's own state of these

    @contextmanager
    def generating(self, component: nn.Module) -> Iterator[None]:
        """A component generates: changes of it are the request's own from now on."""
        configs: dict[int, nn.Module] = {}
        for part in component.modules():
            configs.setdefault(id(getattr(part, "config", component)), part)
            self._parts.add(id(part))
        before = self._generating.get(id(component))
        self._generating[id(component)] = list(configs.values())
        self._watch()
        try:
            yield
        finally:
            if before is None:
                del self._generating[id(component)]

    def is_generating(self, component: nn.Module) -> bool:
        return id(component) in self._generating

    def has_own(self, component: nn.Module) -> bool:
        """Whether the request has changed this component, which generates."""
        return bool(self._own) and any(id(part) in self._own for part in component.modules())

    def enter(self) -> None:
        """Show the request its own state."""
        for module, own in self._own.values():
            self._save(module)
            own.restore()
        self._watch()

    def _watch(self) -> None:
        """Save the configs of components that generate: writes on them are not reported."""
        for parts in self._generating.values():
            for part in parts:
                self._save(part)

    def touch(self, target: Any, *, deep: bool = False) -> None:
        """Save a module's state before the request first writes on it.

        Args:
            target: the module, its config, or one of its dictionaries of hooks.
            deep: its parts may be written as well.
        """
        owner = self._shared.holders.get(id(target), target)
        if not isinstance(owner, nn.Module):
            return
        for module in owner.modules() if deep else [owner]:
            if id(module) in self._shared.names:
                self._save(module).keep_weights(module)
                self._is_written = True

    def touch_in_forward(self, target: Any) -> None:
        """The same for a module that is written while it computes: weights may be streamed."""
        owner = self._shared.holders.get(id(target), target)
        if id(owner) in self._parts:
            self._save(owner)

    def _save(self, module: nn.Module) -> ModuleState:
        if id(module) not in self._before:
            children = self._shared.children.get(id(module))
            self._before[id(module)] = module, ModuleState.of(module, children, with_storage=False)
        return self._before[id(module)][1]

    @property
    def are_possible(self) -> bool:
        """Whether a module was written since the last pause."""
        return self._is_written

    def take_back(self) -> None:
        """Restore all modules; the changed ones are in `names` from now on, or put back later."""
        for module_id, (module, state) in self._before.items():
            if state.is_now():
                self._own.pop(module_id, None)
                continue
            if module_id in self._parts and state.has_same_weights():
                self._own[module_id] = module, ModuleState.of(module, with_storage=False)
            else:
                self.names[self._shared.names[module_id]] = None
            state.restore()
        self._before.clear()
        self._is_written = False
