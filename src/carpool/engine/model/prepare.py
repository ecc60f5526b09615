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
from carpool.engine.model.files import class_of, modules_of, read_component, read_own
from carpool.engine.model.from_checkpoint import BasePipeline
from carpool.engine.model.modular import Pipeline, is_modular, read_modular
from carpool.engine.model.quantize import (
    is_read_quantized,
    kinds_of,
    quantization_of,
    quantize_read,
    store_as_float8,
)
from carpool.engine.model.single_file import LEFT_OUT, read_whole, single_file
from carpool.engine.model.training_marks import apply_marks
from carpool.errors import LoadFailed, SettingRejected
from carpool.models.source import is_single_file, is_weights
from carpool.settings.preparation import (
    check_components,
    check_gguf,
    check_packages,
    is_denoiser,
    replacements,
)
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
    source, index, whole, replaced = _places(source, settings)
    modules = modules_of(index)
    check_components(settings, modules)
    classes = {name: class_of(*kind) for name, kind in modules.items()}
    begin(source, classes)
    for name, where in replaced.items():
        check_gguf(settings, name, where)
    left_out = {name for name in modules if only is not None and name not in only}
    kinds = {n: kind for n, kind in kinds_of(settings, modules).items() if n not in left_out}
    quantized = {
        name: quantization_of(kind, modules[name][0], device.dtype_of(name), device.torch)
        for name, kind in kinds.items()
    }
    quantized = {name: config for name, config in quantized.items() if config is not None}
    while_read = {n: q for n, q in quantized.items() if is_read_quantized(kinds[n], device.torch)}
    base = BasePipeline(source, settings.revision, pipeline_class(index))
    parts: dict[str, nn.Module] = {}
    marks: dict[str, Any] = {}
    if whole is not None:
        names = classes.keys() - replaced.keys() - left_out
        parts, marks = read_whole(whole, classes, names, base, device.dtype_of, while_read)
        left_out |= classes.keys() & {LEFT_OUT}
    for name in replaced.keys() - left_out:
        parts[name], of_file = read_component(
            name,
            replaced[name],
            classes[name],
            base,
            dtype=device.dtype_of(name),
            quantization=while_read.get(name),
        )
        marks |= of_file if is_denoiser(name) else {}
    of_folder = {name: config for name, config in while_read.items() if name not in parts}
    given: dict[str, Any] = dict.fromkeys(left_out) | parts
    if is_modular(index):
        pipe = read_modular(source, settings, device, set(modules), given, of_folder)
    else:
        rest = {name: cls for name, cls in classes.items() if name not in given}
        own = _own_parts(source, rest, settings, device, of_folder)
        of_hub = {name: config for name, config in of_folder.items() if name not in own}
        pipe = _pipeline(source, index, {**given, **own, **_common(settings, device, of_hub)})
    for name, module in given.items():
        refuse_another(pipe, name, module)
    apply_marks(pipe, marks)
    for name in quantized.keys() - of_folder.keys():
        is_from_file = name not in replaced or is_weights(replaced[name])
        if name not in while_read or (is_from_file and modules[name][0] != "transformers"):
            quantize_read(getattr(pipe, name), kinds[name], device.dtype_of(name))
    return pipe


def _places(
    source: str, settings: EngineSettings
) -> tuple[str, dict[str, Any], str | None, dict[str, str]]:
    """Where a pipeline is read from.

    Returns:
        Its folder or hub id, and its index; the file of several components, or None; and where
        single components are, by name.
    """
    replaced = replacements(settings.component)
    if is_single_file(source):
        config, index, component = single_file(source, settings.model_config, settings.revision)
        if component is None:
            return config, index, source, replaced
        return config, index, None, {component: source, **replaced}
    if settings.model_config is not None:
        rule = "it is for a MODEL that is one file"
        raise SettingRejected(f"model_config={settings.model_config!r}: {rule}")
    return source, index_of(source, settings.revision), None, replaced


def _own_parts(
    source: str,
    classes: Mapping[str, Any],
    settings: EngineSettings,
    device: Device,
    quantized: Mapping[str, Any],
) -> dict[str, nn.Module]:
    """The modules that a pipeline's own folder holds; none where it is on the hub."""
    parts = {}
    for name, cls in classes.items():
        dtype, kind = device.dtype_of(name), quantized.get(name)
        own = read_own(name, cls, source, settings.variant, dtype, kind)
        if own is not None:
            parts[name] = own
    return parts


def pipeline_class(index: Mapping[str, Any]) -> Any:
    """The class of a pipeline that diffusers has, by its index; None for others."""
    name = str(index.get("_class_name"))
    cls = class_of("diffusers", "WanPipeline" if name == "WanDMDPipeline" else name)
    return cls if isinstance(cls, type) and issubclass(cls, DiffusionPipeline) else None


def refuse_another(pipe: Pipeline, name: str, module: nn.Module | None) -> None:
    """Refuse a pipeline that holds another module than the one that it was given.

    A pipeline may build its own of it (AnimateDiff's UNet), with all of its weights.

    Raises:
        LoadFailed: names the component.
    """
    held = getattr(pipe, name, None)
    if held is module:
        return
    if isinstance(held, nn.Module) and module is not None:
        own, wanted = held.state_dict(), module.state_dict()
        if all(key in own and torch.equal(own[key], one) for key, one in wanted.items()):
            return
    raise LoadFailed(
        f"{type(pipe).__name__} does not take {name} from elsewhere: leave it out of component"
    )


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


def _pipeline(source: str, index: Mapping[str, Any], given: Mapping[str, Any]) -> DiffusionPipeline:
    """Read a pipeline by its own class: the base class drops optional components in silence."""
    given = {**given, "use_safetensors": True}
    if index.get("_class_name") == "WanDMDPipeline":  # FastWan: not in diffusers
        given["scheduler"] = DMDScheduler()
    cls = pipeline_class(index) or DiffusionPipeline
    pipe: DiffusionPipeline = cls.from_pretrained(source, **given)
    return pipe


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
