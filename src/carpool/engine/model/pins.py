"""Cache properties that pipelines and modules read repeatedly: devices, dtypes, signatures.

To compute `module.device`, `module.dtype` or `get_module_execution_device(module)`, diffusers walks
through all parts of the module, up to three times: milliseconds a request, in which no forward can
start. While an engine runs, these values of a pipeline's component do not change, so a fiber gets
the first value again. Requests that write on modules, private rides, code outside of fibers, and
parts of components get a fresh value each time. Offloaded components are not cached: their weights
move.

At every call, attention layers inspect the signature of their processor for its parameters: a
fortieth of a forward of the embedded model. It is stored where `inspect` looks first.
"""

import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from diffusers import ModelMixin
from torch import nn
from transformers import PreTrainedModel

from carpool.engine.fiber import current_context
from carpool.engine.patches import Patches
from carpool.engine.weights.placement import is_offloaded

_PROPERTIES = ("device", "dtype")
_FUNCTION = "get_module_execution_device"  # diffusers' pipelines import it by name


class Pins:
    """The cached values of the components of some pipelines."""

    def __init__(self, components: Iterable[nn.Module], pipelines: Iterable[Any] = ()) -> None:
        self._classes = [cls for pipe in pipelines for cls in type(pipe).__mro__]
        self._modules = list(components)
        self._components = {id(c) for c in self._modules if not is_offloaded(c)}
        self._answers: dict[tuple[int, str], Any] = {}

    def patches(self) -> list[Patches]:
        """The patches of diffusers' properties and functions, for as long as an engine runs."""
        return [*_all_patches(self._classes), *_signatures(self._modules)]

    def answer(self, module: nn.Module, name: str, ask: Callable[[Any], Any], context: Any) -> Any:
        """The cached value, for a fiber.

        Args:
            ask: computes the value in diffusers.
            context: the fiber's context.
        """
        if id(module) not in self._components or context.changes.before:
            return ask(module)
        key = id(module), name
        if key not in self._answers:
            self._answers[key] = ask(module)
        return self._answers[key]


def _pinned(question: str, ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def answer(module: Any) -> Any:
        context = current_context()
        if context is None or context.pins is None:
            return ask(module)
        return context.pins.answer(module, question, ask, context)

    return answer


def _property(question: str) -> Callable[[Any], Any]:
    return lambda plain: property(_pinned(question, plain.fget), doc=plain.__doc__)


_properties = [
    Patches(next(base for base in cls.__mro__ if name in vars(base)), {name: _property(name)})
    for cls in (ModelMixin, PreTrainedModel)
    for name in _PROPERTIES
]
_functions: dict[str, Patches] = {}  # keyed by the importing module
_signed: dict[types.FunctionType, Patches] = {}


def _all_patches(classes: Iterable[type]) -> list[Patches]:
    """Patches of the properties, and of the function in the modules of these pipelines."""
    functions = {}
    for name in dict.fromkeys(cls.__module__ for cls in classes):
        if name.startswith("diffusers.pipelines.") and _FUNCTION in vars(sys.modules[name]):
            pin = {_FUNCTION: lambda plain: _pinned(_FUNCTION, plain)}
            functions[name] = _functions.setdefault(name, Patches(sys.modules[name], pin))
    return [*_properties, *functions.values()]


def _signatures(components: Iterable[nn.Module]) -> list[Patches]:
    """Patches that store the signatures of the functions that attention layers call."""
    for component in components:
        for part in component.modules():
            function: Any = type(getattr(part, "processor", None)).__call__
            if isinstance(function, types.FunctionType):
                signature = inspect.signature(function)
                pin = {"__signature__": lambda _, value=signature: value}
                _signed.setdefault(function, Patches(function, pin))
    return list(_signed.values())
