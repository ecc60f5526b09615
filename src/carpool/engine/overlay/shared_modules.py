"""The modules that all requests of an engine share: their names, parts and original state.

In-place writes on weights are not reported. The end of a request detects them by the tensors'
version counters: too late to restore the values.
"""

from collections.abc import Mapping
from typing import Any

from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import HookRegistry
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

from carpool.engine.overlay.module_state import REGISTRY, ModuleState


class SharedModules:
    """The modules of one pipeline; writes on them by fibers are detected.

    Attributes:
        names: such as "transformer.blocks.0", by module id.
        children: the direct children, by module id.
        holders: the owner of a config or a dictionary of hooks, by the id of that.
    """

    def __init__(self, components: Mapping[str, nn.Module]) -> None:
        """
        Args:
            components: the pipeline's modules by their names in it.
        """
        self._components = dict(components)
        # forwards leave hooks and caches behind; `remove` restores these
        self._before = [
            ModuleState.of(module, with_storage=False)
            for component in components.values()
            for module in component.modules()
        ]
        self._registries: list[nn.Module] = []
        self.names: dict[int, str] = {}
        self.children: dict[int, dict[str, nn.Module | None]] = {}
        self.holders: dict[int, nn.Module] = {}
        self._weights: dict[int, tuple[str, Tensor]] = {}  # component and weight, by weight id
        self._versions: list[int] = []  # versions of the weights
        self._alive: list[Any] = []  # references that keep the ids valid

    def install(self) -> None:
        """Record the modules as they are; the patches of `writes` detect writes from then on."""
        for name, component in self._components.items():
            for inner, module in component.named_modules():
                if id(module) not in self.names:
                    self.names[id(module)] = f"{name}.{inner}" if inner else name
                    self.children[id(module)] = dict(module._modules)
                    self._add(name, module)
            # otherwise the first `cache_context` would create it, which is not a request's change
            if isinstance(component, CacheMixin) and not hasattr(component, REGISTRY):
                HookRegistry.check_if_exists_or_initialize(component)
                self._registries.append(component)
        self._versions = [weight._version for _, weight in self._weights.values()]

    def _add(self, component: str, module: nn.Module) -> None:
        parts = [value for name, value in vars(module).items() if name.endswith("_hooks")]
        if isinstance(config := vars(module).get("_internal_dict"), FrozenDict):
            parts.append(config)
        self.holders.update(dict.fromkeys(map(id, parts), module))
        for weight in module._parameters.values():
            if weight is not None and not weight.is_inference():
                self._weights[id(weight)] = component, weight
        self._alive += [module, *parts]

    def changed_weights(self) -> list[str]:
        """The components whose weights were written in place since the last call."""
        weights = self._weights.values()
        versions, self._versions = self._versions, [weight._version for _, weight in weights]
        if versions == self._versions:
            return []
        pairs = zip(weights, versions, self._versions, strict=True)
        return list(dict.fromkeys(name for (name, _), before, now in pairs if before != now))

    def remove(self) -> None:
        """Restore all modules. Harmless when not installed."""
        if not self._alive:
            return
        while self._registries:
            module = self._registries.pop()
            if not getattr(module, REGISTRY).hooks:
                delattr(module, REGISTRY)
        self._versions.clear()
        for registry in (self.names, self.children, self.holders, self._weights):
            registry.clear()
        self._alive.clear()
        for state in self._before:
            state.restore()
