"""Report writes on modules, their parameters, hooks and configs to the fiber that makes them.

Python code changes a module through methods of a few classes. While an engine runs, these tell the
context of their fiber first; outside of fibers, and so inside of forwards, they do what they
always did. Nothing is looked at that is not written, so that it costs nothing per step.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import HookRegistry
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from carpool.engine.fiber import current_context
from carpool.engine.patches import Patches

_DATA: Any = torch.Tensor.data  # the descriptor itself, whatever a subclass puts before it
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

_ON_MODULES = (
    *("__setattr__", "__delattr__", "_apply", "add_module"),
    *(name for name in vars(nn.Module) if name.startswith("register_")),
)
IN_PLACE = (
    "__setitem__",
    *(
        f"__i{name}__"
        for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
    ),
    *(
        name
        for name in dir(torch.Tensor)
        if name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
    ),
)

# What shares a tensor's values: it may be written on later, without a report. `detach` and
# `numpy` give the values themselves; for torch's functions of these names see `functions`.
_VIEWS = (
    *("__getitem__", "__iter__", "__array__", "numpy", "detach", "view", "view_as", "reshape"),
    *("reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze", "transpose", "t"),
    *("swapaxes", "swapdims", "adjoint", "permute", "movedim", "moveaxis", "narrow", "select"),
    *("unbind", "split", "tensor_split", "hsplit", "vsplit", "dsplit", "chunk", "unfold"),
    *("diagonal", "expand", "expand_as", "as_strided", "untyped_storage", "__dlpack__"),
)
_VIEW_PROPERTIES = ("T", "mT", "H", "mH", "real")


def data(tensor: Tensor) -> Tensor:
    """`tensor.data`, unreported: it shares the tensor's storage, and none of its versions."""
    found: Tensor = _DATA.__get__(tensor)
    return found


def point(tensor: Tensor, to: Tensor) -> None:
    """`tensor.data = to`, unreported."""
    _DATA.__set__(tensor, to)


def _reporting(
    plain: Callable[..., Any],
    *,
    deep: bool = False,
    what: Callable[[Any], Any] = lambda written: written,
) -> Callable[..., Any]:
    """A method that tells the fiber which calls it of the write."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is not None:
            context.overlay.touch(what(self), deep=deep)
        return plain(self, *args, **kwargs)

    return method


def _on_a_copy(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes a parameter's values, or lets them be written: the request's own."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is not None:
            context.overlay.own(self)
        return plain(self, *args, **kwargs)

    return method


def _data_property(_: Any) -> property:
    """`.data` of parameters: what is read may be written later, without a trace."""

    def get(self: Tensor) -> Tensor:
        context = current_context()
        if context is not None:
            context.overlay.own(self)
        return data(self)

    def put(self: Tensor, value: Tensor) -> None:
        context = current_context()
        if context is not None:
            context.overlay.touch(self)
        point(self, value)

    return property(get, put)


def _view_property(plain: Any) -> property:
    return property(_on_a_copy(plain.__get__))


def _flag_property(_: Any) -> property:
    def put(self: Tensor, value: bool) -> None:
        context = current_context()
        if context is not None:
            context.overlay.touch(self)
        _REQUIRES_GRAD.__set__(self, value)

    return property(_REQUIRES_GRAD.__get__, put)


def _hooks_of(handle: Any) -> Any:
    return handle.hooks_dict_ref()


def _module_of(registry: Any) -> Any:
    return registry._module_ref


# On classes: an own class for each module would fail where libraries ask for `type(module)`.
PATCHES = (
    Patches(
        nn.Module,
        dict.fromkeys(_ON_MODULES, _reporting)
        | dict.fromkeys(
            ("requires_grad_", "load_state_dict"), functools.partial(_reporting, deep=True)
        ),
    ),
    Patches(
        nn.Parameter,
        dict.fromkeys((*IN_PLACE, *_VIEWS), _on_a_copy)
        | dict.fromkeys(_VIEW_PROPERTIES, _view_property)
        | {"requires_grad_": _reporting, "data": _data_property, "requires_grad": _flag_property},
    ),
    Patches(FrozenDict, dict.fromkeys(("__setattr__", "__setitem__"), _reporting)),
    Patches(RemovableHandle, {"remove": functools.partial(_reporting, what=_hooks_of)}),
    Patches(
        HookRegistry,
        dict.fromkeys(
            ("register_hook", "remove_hook"), functools.partial(_reporting, what=_module_of)
        ),
    ),
)
