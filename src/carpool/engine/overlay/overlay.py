"""Copy-on-write for modules: what a request writes on a shared module is seen by itself alone.

Pipelines may change shared modules in the middle of a call: attention processors, config entries,
attributes, hooks, number types, weights. `writes` reports that to the fiber it happens in. An
`Overlay` keeps what its request changed, and puts the modules back whenever the request's fiber
pauses or ends.

Source: copy-on-write, as in `fork`; here the unit is one module's own attributes, children,
hooks and the storage that its parameters and buffers point to.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from carpool.engine.overlay.module_state import ModuleState
from carpool.engine.overlay.shared_modules import SharedModules
from carpool.engine.overlay.writes import data, point


class Overlay:
    """The changes that one request made to shared modules."""

    def __init__(self, shared: SharedModules, *, is_watched: bool = False) -> None:
        """
        Args:
            is_watched: writes on lists, dictionaries and plain objects of modules are found, too.
        """
        self._shared = shared
        self._containers = shared.containers() if is_watched else []
        self._touched: dict[int, _ChangedModule] = {}
        self.changed: dict[str, None] = {}  # names of modules that were ever changed, in order

    def touch(self, what: Any, *, deep: bool = False) -> None:
        """Remember how a module is, before the request first writes on it.

        Args:
            what: the module, or one of its parameters, its config, one of its dicts of hooks.
        """
        modules = self._shared.holders.get(id(what))
        if modules is None:
            if not isinstance(what, nn.Module):
                return
            modules = list(what.modules()) if deep else [what]
        for one in modules:
            if id(one) in self._shared.names and id(one) not in self._touched:
                before = ModuleState.of(one, self._shared.children[id(one)])
                self._touched[id(one)] = _ChangedModule(one, before)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a weight or a buffer of a shared module."""
        return id(tensor) in self._shared.holders

    def own(self, parameter: Tensor) -> None:
        """Give the request a copy of what a weight or buffer holds, before it writes on that."""
        modules = [
            module
            for module in self._shared.holders.get(id(parameter), ())
            if id(module) in self._shared.names
        ]
        if not modules:
            return
        self.touch(parameter)
        if self._touched[id(modules[0])].before.has(parameter):
            point(parameter, data(parameter).clone())

    def covers(self, component: nn.Module) -> bool:
        """Whether the request has changed this component, or a module inside of it."""
        self._take_unreported()
        for known, one in self._touched.items():
            if id(component) in self._shared.owners[known] and one.is_changed:
                one.before.reunite()  # a view was taken, and nothing written on it
                if one.is_changed:
                    return True
        return False

    def apply(self) -> None:
        """Show the request its own modules."""
        for buffer in self._shared.written:  # by a forward
            buffer.keep()
        for container in self._containers:
            if container.is_written:
                container.keep()
        for one in self._touched.values():
            one.before = ModuleState.of(
                one.module
            )  # others may have changed what they share meanwhile
        for one in self._touched.values():  # not before: two may hold one parameter
            assert one.mine is not None, "an overlay is applied twice"
            one.mine.restore()

    def withdraw(self) -> None:
        """Show everybody the shared modules again."""
        self._take_unreported()
        changed: list[_ChangedModule] = []
        for known, one in list(self._touched.items()):
            self._shared.expect(one.module)
            one.before.reunite()
            if not one.is_changed:
                del self._touched[known]
                continue
            self.changed[self._shared.names[known]] = None
            changed.append(one)
        for one in changed:
            one.mine = ModuleState.of(one.module)
        for one in changed:
            one.before.restore()

    def _take_unreported(self) -> None:
        """Buffers and containers that the request wrote in are its own, the copies everybody's."""
        for container in self._containers:
            if container.is_written:
                self.touch(container.module)
                self._touched[id(container.module)].before.correct(container.held, container.copy)
        for buffer in self._shared.written:
            touched = self._touched.get(id(buffer.module))
            if touched is None or touched.before.has(buffer.tensor):
                mine = data(buffer.tensor)
                point(buffer.tensor, buffer.copy)
                self.touch(buffer.module)
                self._touched[id(buffer.module)].before.replace(buffer.tensor, buffer.copy)
                point(buffer.tensor, mine)
                buffer.copy = buffer.copy.clone()
            buffer.version = buffer.tensor._version


@dataclass(slots=True)
class _ChangedModule:
    module: nn.Module
    before: ModuleState
    mine: ModuleState | None = None

    @property
    def is_changed(self) -> bool:
        return not self.before.is_now()
