"""Move and cast the inputs of a module that has another device or dtype."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_AS_THEY_ARE = ("timestep", "sigma", "ids", "rotary", "freqs", "guidance", "mask")
"""Parts of names of arguments that are never cast: a coarser dtype would change their meaning."""


def at_border(
    original: Callable[..., Any],
    positional: tuple[str, ...],
    device: torch.device | None = None,
    home: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Wrap a module's method so that it accepts tensors of other devices and dtypes.

    Args:
        original: the method.
        positional: the names of its arguments, in order.
        device: the module's; its arguments are moved there. None: they are already there.
        home: the device of the rest of the pipeline; the answer is moved there.
        dtype: the module's; floating arguments are cast to it. None: no cast.
    """

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        names = dict(zip(positional, args, strict=False))
        converted = [_enter(name, value, device, dtype) for name, value in names.items()]
        rest = {name: _enter(name, value, device, dtype) for name, value in kwargs.items()}
        answer = original(*converted, *args[len(converted) :], **rest)
        return answer if home is None else moved(answer, home)

    return method


def _enter(name: str, value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and not any(part in name for part in _AS_THEY_ARE)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.to(dtype) if is_cast and leaf.is_floating_point() else leaf
        return leaf if device is None else leaf.to(device)

    return tree_map(one, value)


def moved(answer: Any, device: torch.device) -> Any:
    """Move the tensors of a module's answer to a device; distributions are rebuilt."""
    if hasattr(answer, "latent_dist"):
        answer.latent_dist = type(answer.latent_dist)(answer.latent_dist.parameters.to(device))
        return answer
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, answer)
