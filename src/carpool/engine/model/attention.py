"""Set the attention back end of denoisers, if it runs here."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from torch import nn

from carpool.engine.model.device import Device
from carpool.errors import SettingRejected, nearest
from carpool.settings.preparation import is_denoiser


def set_attention(
    modules: Mapping[str, nn.Module], backend: str, device: Device, undo: ExitStack
) -> None:
    """Set the attention back end of denoisers.

    Diffusers also makes the last choice the default of the whole process: that is restored.
    """
    backends = [name.value for name in AttentionBackendName]
    if backend not in backends:
        raise SettingRejected(
            f"attention_backend={backend!r}: diffusers knows no such{nearest(backend, backends)}: "
            f"it has {', '.join(backends)}"
        )
    able = {n: m for n, m in modules.items() if hasattr(m, "set_attention_backend")}
    denoisers = {name: module for name, module in able.items() if is_denoiser(name)}
    if not any(list(_processors(module)) for module in denoisers.values()):
        raise SettingRejected(
            f"attention_backend={backend!r}: the denoisers of this model take no other than "
            "PyTorch's own: leave it out"
        )
    for module in denoisers.values():
        for part in _processors(module):
            undo.callback(setattr, part, "_attention_backend", part._attention_backend)
        try:
            with attention_backend(AttentionBackendName.NATIVE):  # restores the default on exit
                module.set_attention_backend(backend)  # type: ignore[operator]
        except (RuntimeError, ImportError, ValueError, OSError) as error:
            raise SettingRejected(f"attention_backend={backend!r}: {error}") from error
    for name in denoisers:
        _try(backend, device.torch, device.dtype_of(name))


def _try(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Run a small attention: a back end that does not run here would fail every request.

    Raises:
        SettingRejected: it does not run.
    """
    query = torch.zeros(1, 16, 2, 64, device=device, dtype=dtype)  # rows, tokens, heads, values
    try:
        with torch.no_grad():
            dispatch_attention_fn(query, query, query, backend=AttentionBackendName(backend))
    except Exception as error:  # a kernel may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise SettingRejected(
            f"attention_backend={backend!r}: does not run on {device.type} in {dtype} "
            f"({type(error).__name__}: {first}): take native, or leave it out"
        ) from error


def _processors(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if hasattr(processor := getattr(part, "processor", None), "_attention_backend"):
            yield processor
