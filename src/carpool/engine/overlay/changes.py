"""The changes that one request makes to shared modules: noticed, and taken back when it pauses.

Pipelines may change shared modules in the middle of a call: attention processors, config entries,
attributes, hooks, number types. No other request runs between the write, which `writes` reports,
and the next pause, where the modules are restored; so no other request sees any of it.
"""

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
            if id(module) in self._shared.names and id(module) not in self._before:
                state = ModuleState.of(module, self._shared.children[id(module)])
                self._before[id(module)] = module, state

    @property
    def are_possible(self) -> bool:
        """Whether a module was written since the last pause."""
        return bool(self._before)

    def take_back(self) -> None:
        """Restore all modules; the changed ones are in `names` from now on."""
        for module_id, (_, state) in self._before.items():
            if not state.is_now():
                self.names[self._shared.names[module_id]] = None
                state.restore()
        self._before.clear()
