"""Prepare a loaded pipeline by settings: devices, dtypes, attention, compiling.

`assembly` has read it, and `carpool.engine.weights` has moved its weights to the device, or streams
them there. Then `apply` does the rest: float8 storage, components on other devices, attention back
ends, tiled decodes, compiled blocks; and `compiling.warm_up` runs every kernel and graph before the
first request.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from inspect import signature
from typing import Any

import torch
from torch import nn

from carpool.config import EngineSettings
from carpool.engine.intercept import methods_of
from carpool.engine.model.attention import set_attention
from carpool.engine.model.border import at_border
from carpool.engine.model.compiling import compile_blocks
from carpool.engine.model.device import Device
from carpool.engine.model.quantize import kinds_of
from carpool.engine.model.sparse_wan import set_share
from carpool.errors import SettingRejected
from carpool.settings.preparation import check_components
from carpool.settings.rules import by_component


def apply(
    modules: Mapping[str, nn.Module], settings: EngineSettings, device: Device, undo: ExitStack
) -> None:
    """Apply settings to loaded modules; `undo` reverts this.

    Raises:
        SettingRejected: a setting does not fit the model or this machine.
    """
    for name, kind in kinds_of(settings, modules).items() if settings.quantize else ():
        if kind.backend == "layerwise":  # diffusers' casting excludes norms and embeddings
            modules[name].enable_layerwise_casting(  # type: ignore[operator]
                storage_dtype=getattr(torch, str(kind.options["storage_dtype"])),
                compute_dtype=device.dtype_of(name),
            )
    _set_borders(modules, settings, device, undo)
    if settings.attention_backend is not None:
        set_attention(modules, settings.attention_backend, device, undo)
    if settings.sparse_attention is not None:
        set_share(modules, settings.sparse_attention, undo)
    if settings.vae_tiling:
        _set_tiling(modules, undo)
    if settings.compile:
        compile_blocks(modules, undo)


def _set_borders(
    modules: Mapping[str, nn.Module], settings: EngineSettings, device: Device, undo: ExitStack
) -> None:
    """Move components to their own devices, and convert tensors between components."""
    places = by_component("place", settings.place)
    if places and (settings.lora or settings.lora_dir):
        raise SettingRejected(
            "place: adapters (lora, lora_dir) lie on the engine's device: leave one of them out"
        )
    check_components(settings, modules)
    is_mixed = len(set(device.dtypes.values())) > 1
    for name, module in modules.items():
        there = None
        if name in places:
            there = _device(name, places[name])
            undo.callback(module.to, device.torch)
            module.to(there)
        if there is None and not is_mixed:
            continue
        dtype = device.dtype_of(name) if is_mixed else None
        for method in methods_of(module):
            original = getattr(module, method)
            positional = tuple(signature(original).parameters)
            wrapped = at_border(original, positional, there, there and device.torch, dtype)
            undo.callback(_restore, module, method, vars(module).get(method))
            vars(module)[method] = wrapped


def _restore(module: nn.Module, attribute: str, before: Any) -> None:
    if before is None:
        del vars(module)[attribute]
    else:
        vars(module)[attribute] = before


def _device(name: str, text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        lines = str(error).splitlines()
        raise SettingRejected(f"place={name}={text}: no such device here ({lines[0]})") from error
    return device


def _set_tiling(modules: Mapping[str, nn.Module], undo: ExitStack) -> None:
    able = [module for module in modules.values() if hasattr(module, "enable_tiling")]
    if not able:
        raise SettingRejected("vae_tiling: this model's autoencoder has no tiles: leave it out")
    for module in able:
        undo.callback(setattr, module, "use_tiling", getattr(module, "use_tiling", False))
        module.enable_tiling()  # type: ignore[operator]
