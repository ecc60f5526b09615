"""Pin what pipelines and modules ask again and again: devices, number types, signatures.

To answer `module.device`, `module.dtype` or `get_module_execution_device(module)`, diffusers walks
through all parts of the module, up to three times: milliseconds a request, in which no forward can
begin. While an engine runs, a component of its pipeline answers the same every time, so a fiber
gets the first answer again. Requests that write on modules, private rides, code outside of fibers,
and parts of components get a new one each time. Components that are offloaded are not pinned: their
weights move.

Attention layers ask at every call for the signature of their processor, to know which arguments it
takes: a fortieth of a forward of the embedded model. It is kept where `inspect` looks for it first.
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
_FUNCTION = "get_module_execution_device"  # of diffusers: its pipelines import it by name


class Pins:
    """The answers of the components of some pipelines, each asked for once."""

    def __init__(self, components: Iterable[nn.Module], pipelines: Iterable[Any] = ()) -> None:
        self._classes = [cls for pipe in pipelines for cls in type(pipe).__mro__]
        self._modules = list(components)
        self._components = {id(c) for c in self._modules if not is_offloaded(c)}
        self._answers: dict[tuple[int, str], Any] = {}
        self._installed: list[Patches] = []

    def install(self) -> None:
        self._installed = [*_all_patches(self._classes), *_signatures(self._modules)]
        for patches in self._installed:
            patches.add()

    def remove(self) -> None:
        """Have diffusers answer again. Harmless when not installed."""
        while self._installed:
            self._installed.pop().drop()
        self._answers.clear()

    def answer(self, module: nn.Module, name: str, ask: Callable[[Any], Any], context: Any) -> Any:
        """The pinned answer, for a fiber.

        Args:
            ask: asks diffusers.
            context: of the fiber.
        """
        if id(module) not in self._components or context.changes.are_possible:
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


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


_properties = [
    Patches(_owner(cls, name), {name: _property(name)})
    for cls in (ModelMixin, PreTrainedModel)
    for name in _PROPERTIES
]
_functions: dict[str, Patches] = {}  # by the module that has imported it
_signed: dict[types.FunctionType, Patches] = {}


def _all_patches(classes: Iterable[type]) -> list[Patches]:
    """For the properties, and for the function in the files of these pipelines."""
    functions = {}
    for name in dict.fromkeys(cls.__module__ for cls in classes):
        if name.startswith("diffusers.pipelines.") and _FUNCTION in vars(sys.modules[name]):
            pin = {_FUNCTION: lambda plain: _pinned(_FUNCTION, plain)}
            functions[name] = _functions.setdefault(name, Patches(sys.modules[name], pin))
    return [*_properties, *functions.values()]


def _signatures(components: Iterable[nn.Module]) -> list[Patches]:
    """For the functions that attention layers call: signatures that are not made anew each time."""
    for component in components:
        for part in component.modules():
            function: Any = type(getattr(part, "processor", None)).__call__
            if isinstance(function, types.FunctionType):
                signature = inspect.signature(function)
                pin = {"__signature__": lambda _, value=signature: value}
                _signed.setdefault(function, Patches(function, pin))
    return list(_signed.values())
