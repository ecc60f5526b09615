"""Prepare a pipeline as settings say: number types, quantization, devices, attention, compiling.

The steps, in their order:

1. `read`: from files, with number types, quantized weights and components from elsewhere; then
   `carpool.engine.weights` moves weights to the device, or streams them there;
2. `apply`, on a pipeline that is there: float8 storage, components on other devices, attention
   back ends, tiled decodes, compiled blocks;
3. `compiling.warm_up`: every kernel and graph runs before the first request.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from inspect import signature
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline, PipelineQuantizationConfig
from torch import nn

from carpool.config import EngineSettings
from carpool.engine.intercept import methods_of
from carpool.engine.model.attention import set_attention
from carpool.engine.model.border import at_border
from carpool.engine.model.compiling import compile_blocks
from carpool.engine.model.device import Device
from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.files import class_of, modules_of, read_component, single_file
from carpool.engine.model.modular import Pipeline, is_modular, read_modular
from carpool.engine.model.quantize import (
    is_read_quantized,
    kinds_of,
    quantization_of,
    quantize_read,
    store_as_float8,
)
from carpool.errors import LoadFailed, SettingRejected
from carpool.models.source import SINGLE_FILES, is_single_file
from carpool.settings.preparation import check_components, check_gguf, check_packages, replacements
from carpool.settings.rules import by_component


def read(
    source: str,
    settings: EngineSettings,
    device: Device,
    only: Collection[str] | None = None,
    begin: Callable[[str, Mapping[str, type]], object] = lambda source, classes: None,
) -> Pipeline:
    """Read a pipeline from its files, to the host: `engine.weights` moves it to its device.

    Args:
        source: a folder, a hub id or a file, as `carpool.models.source.find` gave it.
        only: the modules to read; the pipeline lacks the others. Default: all.
        begin: called before anything large is read, with the classes of all modules.

    Raises:
        SettingRejected: a setting names a component that the model has not, or does not suit it.
        LoadFailed: a file is not there, or does not fit.
    """
    check_packages(settings)
    whole, replaced = None, replacements(settings.component)
    if is_single_file(source):
        file = source
        source, index, component = single_file(file, settings.model_config, settings.revision)
        if component is None:
            whole = file
        else:
            replaced = {component: file, **replaced}
    elif settings.model_config is not None:
        rule = "it is for a MODEL that is one file"
        raise SettingRejected(f"model_config={settings.model_config!r}: {rule}")
    else:
        index = index_of(source, settings.revision)
    modules = modules_of(index)
    check_components(settings, modules)
    begin(source, {name: class_of(*where) for name, where in modules.items()})
    left_out = {name for name in modules if only is not None and name not in only}
    for name, where in replaced.items():
        check_gguf(settings, name, where)
    kinds = {n: one for n, one in kinds_of(settings, modules).items() if n not in left_out}
    quantized = {
        name: quantization_of(kind, modules[name][0], device.dtype_of(name), device.torch)
        for name, kind in kinds.items()
    }
    quantized = {name: config for name, config in quantized.items() if config is not None}
    afterwards = {
        name
        for name in quantized
        if whole is not None
        or (modules[name][0] != "transformers" and replaced.get(name, "").endswith(SINGLE_FILES))
        or not is_read_quantized(kinds[name], device.torch)
    }
    while_read = {name: one for name, one in quantized.items() if name not in afterwards}
    given: dict[str, Any] = dict.fromkeys(left_out) | {
        name: read_component(
            name,
            where,
            modules[name],
            source,
            dtype=device.dtype_of(name),
            quantization=while_read.pop(name, None),
            revision=settings.revision,
        )
        for name, where in replaced.items()
        if name not in left_out
    }
    if is_modular(index):
        pipe = read_modular(source, settings, device, set(modules), given, while_read)
    else:
        pipe = _pipeline(source, index, whole, {**given, **_common(settings, device, while_read)})
    for name in afterwards:
        quantize_read(getattr(pipe, name), kinds[name], device.dtype_of(name))
    return pipe


def index_of(source: str, revision: str | None) -> dict[str, Any]:
    """The index of a pipeline of its own class, or of a modular one."""
    try:
        return dict(DiffusionPipeline.load_config(source, revision=revision))
    except OSError:
        try:
            return dict(ModularPipeline.load_config(source, revision=revision))
        except OSError:
            pass
        raise


def _common(
    settings: EngineSettings, device: Device, quantized: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings that all components are read with."""
    dtypes: Any = device.dtype
    if len(device.dtypes) > 1:
        dtypes = {"default": device.dtype, **{n: t for n, t in device.dtypes.items() if n}}
    given = {"revision": settings.revision, "dtype": dtypes}
    if settings.variant is not None:
        given["variant"] = settings.variant
    if quantized:
        given["quantization_config"] = PipelineQuantizationConfig(quant_mapping=dict(quantized))
    return given


def _pipeline(
    source: str, index: Mapping[str, Any], whole: str | None, given: Mapping[str, Any]
) -> DiffusionPipeline:
    name = str(index.get("_class_name"))
    if whole is not None:
        if isinstance(given["dtype"], dict):
            raise SettingRejected(
                f"{whole} is a whole model in one file, which is read in one number type: save it "
                "as a folder (save_pretrained) for more",
                param="dtype",
            )
        cls = class_of("diffusers", name)
        if not hasattr(cls, "from_single_file"):
            raise LoadFailed(f"diffusers reads no {name} from one file: take its folder or hub id")
        pipe: DiffusionPipeline = cls.from_single_file(whole, config=source, **given)
        return pipe
    given = {**given, "use_safetensors": True}
    if name == "WanDMDPipeline":  # FastWan: not in diffusers
        return class_of("diffusers", "WanPipeline").from_pretrained(
            source, scheduler=DMDScheduler(), **given
        )
    return DiffusionPipeline.from_pretrained(source, **given)


def apply(
    modules: Mapping[str, nn.Module],
    settings: EngineSettings,
    device: Device,
    undo: ExitStack,
) -> None:
    """Do what is done to modules that are there; `undo` takes it back.

    Raises:
        SettingRejected: a setting does not suit the model, or this machine.
    """
    for name, kind in kinds_of(settings, modules).items() if settings.quantize else ():
        if kind.backend == "layerwise":
            storage = str(kind.options["storage_dtype"])
            store_as_float8(modules[name], storage, device.dtype_of(name))
    _set_borders(modules, settings, device, undo)
    if settings.attention_backend is not None:
        set_attention(modules, settings.attention_backend, device, undo)
    if settings.vae_tiling:
        _set_tiling(modules, undo)
    if settings.compile:
        compile_blocks(modules, undo)


def _set_borders(
    modules: Mapping[str, nn.Module], settings: EngineSettings, device: Device, undo: ExitStack
) -> None:
    """Put components on the devices of their own, and let all take what others give."""
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


def _device(name: str, said: str) -> torch.device:
    try:
        device = torch.device(said)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        lines = str(error).splitlines()
        raise SettingRejected(f"place={name}={said}: no such device here ({lines[0]})") from error
    return device


def _set_tiling(modules: Mapping[str, nn.Module], undo: ExitStack) -> None:
    able = [module for module in modules.values() if hasattr(module, "enable_tiling")]
    if not able:
        raise SettingRejected("vae_tiling: this model's autoencoder has no tiles: leave it out")
    for module in able:
        undo.callback(setattr, module, "use_tiling", getattr(module, "use_tiling", False))
        module.enable_tiling()  # type: ignore[operator]
