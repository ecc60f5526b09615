"""Intercept the heavy methods of a pipeline's modules.

While an `Interception` is installed, calling `transformer.forward`, `vae.decode`, ... inside a
fiber parks the fiber with a `Call` instead of running anything. Outside of fibers, and so inside
the forward that the engine itself runs, the methods do what they always did.

The methods are replaced on the instance, because pipelines read attributes of the module
(`.config`, `.dtype`) and a wrapped module would have to fake them all.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from carpool.engine.fiber import current_context, in_fiber, park
from carpool.engine.row_mixing import mixes_rows
from carpool.engine.specs import Spec
from carpool.engine.specs.plugins import spec_of
from carpool.request.lora import Riding
from carpool.types import Phase, phase_of

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Target:
    """A method that is intercepted."""

    component: str  # the pipeline's name for the module
    module: nn.Module
    method: str
    original: Callable[..., Any]
    positional: tuple[str, ...]  # parameter names in order
    phase: Phase
    spec: Spec | None  # None: calls of this method run alone
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of what a call may leave out
    is_exclusive: bool = False  # of one request, in whose own state it runs: see `isolation.py`


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One method call that a fiber is parked on."""

    target: Target
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lora: Riding = ()  # of its request

    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {**dict(zip(self.target.positional, self.args, strict=False)), **self.kwargs}


def methods_of(module: nn.Module) -> list[str]:
    """The heavy methods of a pipeline component.

    An autoencoder is called through `encode` and `decode`. A model that generates token by token
    is intercepted at `generate` as a whole: inside, it keeps state on the module.
    """
    methods = [name for name in ("encode", "decode") if callable(getattr(module, name, None))]
    methods = methods or ["forward"]
    can_generate = getattr(module, "can_generate", None)
    if callable(can_generate) and can_generate():
        methods.append("generate")
    return methods


class Interception:
    """The intercepted methods of one pipeline's modules."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        self.targets: list[Target] = []
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        seen: set[int] = set()
        for component, module in components.items():
            if not isinstance(module, nn.Module) or id(module) in seen:
                continue
            seen.add(id(module))
            for method in methods_of(module):
                self.targets.append(_target(component, module, method))

    def install(self) -> None:
        for target in self.targets:
            attributes = target.module.__dict__
            self._replaced.append(
                (target.module, target.method, attributes.get(target.method, _ABSENT))
            )
            attributes[target.method] = _parking(target)

    def remove(self) -> None:
        """Leave every module exactly as `install` found it. Harmless when not installed."""
        while self._replaced:
            module, method, before = self._replaced.pop()
            if before is _ABSENT:
                del module.__dict__[method]
            else:
                module.__dict__[method] = before


def _target(component: str, module: nn.Module, method: str) -> Target:
    original = getattr(module, method)
    parameters = list(inspect.signature(original).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return Target(
        component=component,
        module=module,
        method=method,
        original=original,
        positional=tuple(positional),
        phase=phase_of(component, method),
        spec=None if takes_any else spec_of(type(module).__name__, method),
        defaults={p.name: p.default for p in parameters if p.default is not p.empty},
        is_exclusive=mixes_rows(module) is not None,
    )


def _parking(target: Target) -> Callable[..., Any]:
    original = target.original

    @functools.wraps(original)  # transformers reads the signature of `forward`
    def method(*args: Any, **kwargs: Any) -> Any:
        if not in_fiber():
            return original(*args, **kwargs)
        context = current_context()
        return park(Call(target if context is None else context.own(target), args, kwargs))

    return method
