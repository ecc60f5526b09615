"""Report writes on shared modules, their hooks and their configs to the fiber that makes them.

Python code changes a module through methods of a few classes. While an engine runs, these first
report to the context of their fiber; outside of fibers, and so in most forwards, and in private
rides they work as usual. Only writes are intercepted: a step costs nothing.

In-place writes on weights are not reported. Code that may make such writes rides privately.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import HookRegistry
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from carpool.engine.fiber import current_context
from carpool.engine.patches import Patches

_in_forward: ContextVar[Callable[[Any], None] | None] = ContextVar("_in_forward", default=None)
_DATA: Any = torch.Tensor.data  # the descriptor itself, even if a subclass overrides it
_ON_MODULES = (  # without hooks for gradients and state dictionaries, which no pipeline uses
    *("__setattr__", "__delattr__", "_apply", "add_module", "register_module", "register_buffer"),
    *("register_parameter", "register_forward_hook", "register_forward_pre_hook"),
)
_ON_LORA = ("set_scale", "scale_layer", "unscale_layer")  # they write dictionaries of the layer


@contextmanager
def reporting(touch: Callable[[Any], None]) -> Iterator[None]:
    """Also report writes of a forward, which runs outside of fibers: `touch` gets the owner."""
    token = _in_forward.set(touch)
    try:
        yield
    finally:
        _in_forward.reset(token)


def data(tensor: Tensor) -> Tensor:
    """`tensor.data`: it shares the tensor's storage but not its version counter."""
    values: Tensor = _DATA.__get__(tensor)
    return values


def point(tensor: Tensor, to: Tensor) -> None:
    """`tensor.data = to`."""
    _DATA.__set__(tensor, to)


def _reporting(
    plain: Callable[..., Any],
    *,
    deep: bool = False,
    owner: Callable[[Any], Any] = lambda target: target,
) -> Callable[..., Any]:
    """A method that reports the write to the fiber that calls it.

    Args:
        deep: all submodules may be written.
        owner: returns the key of the written module in `SharedModules.holders`.
    """

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is not None and not context.is_private:
            context.changes.touch(owner(self), deep=deep)
        elif context is None and (touch := _in_forward.get()) is not None:
            touch(owner(self))
        return plain(self, *args, **kwargs)

    return method


# Patched on classes: a subclass per module would break libraries that check `type(module)`.
_PATCHES = (
    Patches(
        nn.Module,
        dict.fromkeys(_ON_MODULES, _reporting)
        | {"requires_grad_": functools.partial(_reporting, deep=True)},
    ),
    Patches(FrozenDict, dict.fromkeys(("__setattr__", "__setitem__"), _reporting)),
    Patches(
        RemovableHandle,
        {"remove": functools.partial(_reporting, owner=lambda handle: handle.hooks_dict_ref())},
    ),
    Patches(
        HookRegistry,
        dict.fromkeys(
            ("register_hook", "remove_hook"),
            functools.partial(_reporting, owner=lambda registry: registry._module_ref),
        ),
    ),
)
_ON_IP_ADAPTERS = {  # scales are entries of lists of the attention processors
    "set_ip_adapter_scale": functools.partial(_reporting, deep=True, owner=lambda pipe: pipe.unet)
}
_LATER: dict[tuple[str, str], dict[str, Any]] = {
    ("peft.tuners.lora", "LoraLayer"): dict.fromkeys(_ON_LORA, _reporting),
    ("peft.tuners.lycoris_utils", "LycorisLayer"): dict.fromkeys(_ON_LORA, _reporting),
    ("diffusers.loaders.ip_adapter", "IPAdapterMixin"): _ON_IP_ADAPTERS,
    ("diffusers.loaders.ip_adapter", "ModularIPAdapterMixin"): _ON_IP_ADAPTERS,
}
_later: dict[tuple[str, str], Patches] = {}  # keyed as `_LATER`


def all_patches() -> list[Patches]:
    """The patches for imported libraries: PEFT imports slowly, and only for a LoRA."""
    for (place, name), replace in _LATER.items():
        if (module := sys.modules.get(place)) is not None and (place, name) not in _later:
            _later[place, name] = Patches(getattr(module, name), replace)
    return [*_PATCHES, *_later.values()]
