"""Copy from the host to an accelerator, inside fibers, without waiting for the device.

A copy from pageable memory waits until all work queued before it is done; a copy from pinned memory
is only queued. Pipelines and schedulers create their positions, noise and constants on the host,
some at every step (UniPC). So while a request's own code runs, `Tensor.to`, `torch.tensor` and
`torch.as_tensor` copy through pinned memory. The source of a small tensor is recorded, so that its
content can be compared without reading the device: see `Fuser`.

Source: PyTorch, "A guide on good usage of non_blocking and pin_memory()".
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.engine import provenance
from carpool.engine.fiber import current_context
from carpool.engine.patches import Patches

MOST_BYTES = 64 * 2**20  # largest copy: pinned memory is never returned to the system
_DENSE = (Tensor, torch.nn.Parameter)


def _to(plain: Any) -> Callable[..., Any]:
    @functools.wraps(plain)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if current_context() is None or not _can_pin(self):
            return plain(self, *args, **kwargs)
        device, dtype = _destination(args, kwargs)
        if device is None or device.type in ("cpu", "meta"):
            return plain(self, *args, **kwargs)
        staged = _pinned(self if dtype is None else plain(self, dtype))
        if staged is None:
            return plain(self, *args, **kwargs)
        layout = {name: kwargs[name] for name in ("memory_format",) if name in kwargs}
        copied = plain(staged, device, non_blocking=True, **layout)
        provenance.note_copy(copied, staged)
        return copied

    return to


def _can_pin(value: Tensor) -> bool:
    return (
        value.device.type == "cpu"
        and type(value) in _DENSE
        and value.layout is torch.strided
        and not (value.requires_grad and torch.is_grad_enabled())
    )


def _pinned(value: Tensor) -> Tensor | None:
    """A copy in pinned memory; None if none is available."""
    if value.nbytes > MOST_BYTES:
        return None
    try:
        return torch.empty_like(value, pin_memory=True).copy_(value)
    except RuntimeError:  # not supported by this kind of device, or the host is short of it
        return None


def _destination(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and dtype in the arguments of `Tensor.to`."""
    where, dtype = kwargs.get("device"), kwargs.get("dtype")
    for argument in (*args[:2], kwargs.get("other")):
        if isinstance(argument, Tensor):
            return argument.device, argument.dtype
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, (str, torch.device)) or type(argument) is int:
            where = argument
    return None if where is None else torch.device(where), dtype


def _made_on_the_host(name: str) -> Callable[..., Any]:
    """Wrap a torch function that creates a tensor from Python or numpy values."""
    plain = _PLAIN[name]

    @functools.wraps(plain)
    def function(data: Any, *args: Any, **kwargs: Any) -> Any:
        device: Any = kwargs.get("device")
        is_plain = device is None or args or kwargs.get("requires_grad") or isinstance(data, Tensor)
        if is_plain or current_context() is None or torch.device(device).type in ("cpu", "meta"):
            return plain(data, *args, **kwargs)
        return plain(data, **{**kwargs, "device": "cpu"}).to(device)

    return function


_PLAIN: dict[str, Any] = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "cat")}
_INSIDE = {name: _made_on_the_host(name) for name in ("tensor", "as_tensor")}
_INSIDE["cat"] = provenance.cat


def watch() -> None:
    """From now on, new tensors are copied through pinned memory, and concatenations recorded."""
    for name, function in _INSIDE.items():
        setattr(torch, name, function)


def ignore() -> None:
    """Restore torch's functions: compiled graphs are valid for these."""
    for name, function in _PLAIN.items():
        setattr(torch, name, function)


TO = Patches(Tensor, {"to": _to})  # compiled graphs do not depend on `Tensor.to`
