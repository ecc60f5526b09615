"""Keep a VAE that overflows in float16 in float32, while each request sees its expected dtype.

Pipelines that know of such VAEs switch their dtype around each encode and decode, which would
affect other requests. So the weights stay in float32, to which float16 converts without loss. In a
fiber, `to` and `dtype` act on a dtype that is only recorded for its request; a call made while that
is float16 runs in it, alone.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from carpool.engine.fiber import current_context

_TYPES = (torch.float16, torch.float32)


class HeldVae:
    """Overrides put before the own class of a held VAE."""

    dtypes: WeakKeyDictionary[Any, torch.dtype]  # keyed by a request's context
    plain: type[nn.Module]

    @property
    def dtype(self) -> torch.dtype:
        context = _context()
        if context is None:
            return cast("torch.dtype", super().dtype)  # type: ignore[misc]
        return self.dtypes.get(context, torch.float16)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        context = _context()
        plain_to: Any = super().to  # type: ignore[misc]
        try:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        except TypeError:
            return plain_to(*args, **kwargs)
        if context is None or dtype not in _TYPES:
            return plain_to(*args, **kwargs)
        self.dtypes[context] = dtype
        return self if device is None else plain_to(device)

    def is_in_half(self, context: Any) -> bool:
        """Whether the VAE is in float16 for a request at the moment."""
        return self.dtypes.get(context) != torch.float32

    def half(self) -> Any:
        return self.to(torch.float16)

    def float(self) -> Any:
        return self.to(torch.float32)


def _context() -> Any:
    """The context of the running request; None: outside of shared rides, dtypes are real."""
    context = current_context()
    return None if context is None or context.is_private else context


def hold(pipe: Any, undo: ExitStack) -> None:
    """Hold a pipeline's VAE, if it overflows in float16 and the pipeline switches its dtype."""
    vae: Any = getattr(pipe, "vae", None)
    overflows = getattr(getattr(vae, "config", None), "force_upcast", False)
    if not overflows or vae.dtype != torch.float16 or not _flips(pipe):
        return
    plain = type(vae)
    undo.callback(plain.to, vae, torch.float16)  # lossless: float32 holds every float16
    undo.callback(setattr, vae, "__class__", plain)
    vae.to(torch.float32)
    named = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace = {**named, "dtypes": WeakKeyDictionary(), "plain": plain}
    vae.__class__ = type(plain.__name__, (HeldVae, plain), namespace)


@contextmanager
def in_half(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context, held VAEs have the dtype in which they were loaded."""
    autoencoders = [module for module in modules if isinstance(module, HeldVae)]
    for module in autoencoders:
        module.plain.to(cast("nn.Module", module), torch.float16)
    try:
        yield
    finally:
        for module in autoencoders:
            module.plain.to(cast("nn.Module", module), torch.float32)


def _flips(pipe: Any) -> bool:
    """Whether the code of a pipeline switches the dtype; True if the code is not available."""
    try:
        sources = [
            inspect.getsource(sys.modules[cls.__module__])
            for cls in type(pipe).__mro__
            if "DiffusionPipeline" in {base.__name__ for base in cls.__mro__}
        ]
    except (OSError, TypeError, KeyError):
        return True
    return not sources or any("force_upcast" in source for source in sources)
