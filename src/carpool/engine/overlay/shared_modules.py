"""The modules that all requests of an engine share: whose parts are whose, and what was written.

Buffers are plain tensors, whose in-place methods report nothing: copies of the small ones are
kept, and compared by version when a fiber pauses. Weights that were written where nothing reports
it, on another thread, are only found at the end of a request, too late to give them back.
"""

from collections.abc import Mapping
from typing import Any

from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import HookRegistry
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

from carpool.engine.overlay.module_state import REGISTRY, ModuleState, is_same, own_containers
from carpool.engine.overlay.writes import PATCHES, data

MAX_BUFFER_BYTES = 2**20  # of one whose copy is kept
MAX_BUFFERS = 256


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
            ModuleState.of(module, with_storage=False)
            for component in components.values()
            for module in component.modules()
        ]
        self._registries: list[nn.Module] = []
        self.names: dict[int, str] = {}  # "transformer.blocks.0", by id of the module
        self.owners: dict[int, set[int]] = {}  # ids of the components that it is part of
        self.children: dict[int, dict[str, nn.Module | None]] = {}
        # whose config, hooks, parameter or buffer it is, by its id
        self.holders: dict[int, list[nn.Module]] = {}
        self.buffers: list[SharedBuffer] = []
        self._containers: list[SharedContainer] | None = None
        self._weights: dict[int, tuple[str, Tensor, int]] = {}  # component, version; by id
        self._alive: list[Any] = []  # so that ids stay theirs

    def install(self) -> None:
        """Notice writes from now on."""
        for name, component in self._components.items():
            for inner, module in component.named_modules():
                self.names.setdefault(id(module), f"{name}.{inner}" if inner else name)
                self.owners.setdefault(id(module), set()).add(id(component))
                if id(module) not in self.children:
                    self.children[id(module)] = dict(module._modules)
                    self._know(name, module)
            # made at the first `cache_context` otherwise, which is no change of anything
            if isinstance(component, CacheMixin) and not hasattr(component, REGISTRY):
                HookRegistry.check_if_exists_or_initialize(component)
                self._registries.append(component)
        for patches in PATCHES:
            patches.add()

    def _know(self, component: str, module: nn.Module) -> None:
        held = [value for name, value in vars(module).items() if name.endswith("_hooks")]
        tensors = (*module._parameters.values(), *module._buffers.values())
        held += [one for one in tensors if one is not None]
        if isinstance(config := vars(module).get("_internal_dict"), FrozenDict):
            held.append(config)
        for one in held:
            self.holders.setdefault(id(one), []).append(module)
        for weight in module._parameters.values():
            if weight is not None and not weight.is_inference():
                self._weights[id(weight)] = component, weight, weight._version
        for buffer in module._buffers.values():
            if buffer is not None and SharedBuffer.fits(buffer) and len(self.buffers) < MAX_BUFFERS:
                self.buffers.append(SharedBuffer(module, buffer))
        self._alive += [module, *held]

    @property
    def written(self) -> list["SharedBuffer"]:
        """The buffers that were written since the last time that somebody took notice."""
        return [one for one in self.buffers if one.tensor._version != one.version]

    def containers(self) -> list["SharedContainer"]:
        """The lists, dictionaries and sets of all modules, which report no writes."""
        if self._containers is None:
            found: dict[int, SharedContainer] = {}
            for component in self._components.values():
                for module in component.modules():
                    for one in own_containers(module):
                        found.setdefault(id(one), SharedContainer(module, one))
            self._containers = list(found.values())
        return self._containers

    def changed_weights(self) -> list[str]:
        """The components whose weights were written in place since the last time it was asked."""
        found: dict[str, None] = {}
        for known, (component, weight, version) in self._weights.items():
            if weight._version != version:
                self._weights[known] = component, weight, weight._version
                found[component] = None
        return list(found)

    def expect(self, module: nn.Module) -> None:
        """Versions of this module's weights have moved, and it is known why."""
        for weight in module._parameters.values():
            if weight is not None and id(weight) in self._weights:
                component, _, _ = self._weights[id(weight)]
                self._weights[id(weight)] = component, weight, weight._version

    def remove(self) -> None:
        """Notice no more, and make all modules what they were. Harmless when not installed."""
        if not self._alive:
            return
        while self._registries:
            module = self._registries.pop()
            if not getattr(module, REGISTRY).hooks:
                delattr(module, REGISTRY)
        for known in (self.names, self.owners, self.children, self.holders, self._weights):
            known.clear()
        self.buffers.clear()
        self._containers = None
        self._alive.clear()
        for patches in PATCHES:
            patches.drop()
        for state in self._before:
            state.restore()


class SharedContainer:
    """A list, dictionary or set of a shared module, and what of it everybody is to see."""

    def __init__(self, module: nn.Module, held: Any) -> None:
        self.module, self.held = module, held
        self.keep()

    @property
    def is_written(self) -> bool:
        return not is_same(self.held, self.copy)

    def keep(self) -> None:
        held = self.held
        self.copy: Any = dict(held) if isinstance(held, dict) else list(held)


class SharedBuffer:
    """A buffer of a shared module, and a copy of what everybody is to see."""

    def __init__(self, module: nn.Module, tensor: Tensor) -> None:
        self.module, self.tensor = module, tensor
        self.keep()

    @staticmethod
    def fits(tensor: Tensor) -> bool:
        if tensor.is_inference() or tensor.is_meta:
            return False
        return tensor.numel() * tensor.element_size() <= MAX_BUFFER_BYTES

    def keep(self) -> None:
        self.copy, self.version = data(self.tensor).clone(), self.tensor._version
