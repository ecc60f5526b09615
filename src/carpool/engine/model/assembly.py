"""Read a pipeline from its files: its own ones, and components from other places.

All weights end in the model, or it is refused: none is random, and none is dropped.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline, PipelineQuantizationConfig
from torch import nn

from carpool.config import EngineSettings
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
)
from carpool.engine.model.single_file import LEFT_OUT, read_whole, single_file
from carpool.engine.model.training_marks import apply_marks
from carpool.engine.model.turbo_wan import with_sampler
from carpool.errors import LoadFailed, SettingRejected
from carpool.models.source import is_single_file, is_weights
from carpool.settings.preparation import (
    check_components,
    check_gguf,
    check_packages,
    is_denoiser,
    replacements,
)


@dataclass(frozen=True, slots=True)
class _Origin:
    """The sources of a pipeline's parts."""

    source: str  # folder or hub id of all other parts
    index: dict[str, Any]
    whole: str | None  # a file with several components
    replaced: dict[str, str]  # sources of single components
    base: BasePipeline


def read(
    model: str,
    settings: EngineSettings,
    device: Device,
    only: Collection[str] | None = None,
    begin: Callable[[str, Mapping[str, type]], object] = lambda source, classes: None,
) -> Pipeline:
    """Read a pipeline from its files, into host memory: `engine.weights` moves it to its device.

    Args:
        model: a folder, a hub id or a file, from `carpool.models.source.find`.
        only: the modules to read; the pipeline lacks the others. Default: all.
        begin: called before anything large is read, with the classes of all modules.

    Raises:
        SettingRejected: a setting names a missing component, or does not fit it.
        LoadFailed: a file does not exist, or does not fit.
    """
    check_packages(settings)
    origin = _origin(model, settings)
    modules = modules_of(origin.index)
    check_components(settings, modules)
    classes = {name: class_of(*kind) for name, kind in modules.items()}
    begin(origin.source, classes)
    for name, where in origin.replaced.items():
        check_gguf(settings, name, where)
    left_out = {name for name in modules if only is not None and name not in only}
    if origin.whole is not None:
        left_out |= classes.keys() & {LEFT_OUT}
    part_classes = {name: cls for name, cls in classes.items() if name not in left_out}
    kinds = {n: kind for n, kind in kinds_of(settings, modules).items() if n in part_classes}
    quantized = {
        name: config
        for name, kind in kinds.items()
        if (config := quantization_of(kind, modules[name][0], device.dtype_of(name), device.torch))
    }
    while_read = {n: c for n, c in quantized.items() if is_read_quantized(kinds[n], device.torch)}
    parts, marks = _from_elsewhere(origin, classes, part_classes, device, while_read)
    supplied: dict[str, Any] = dict.fromkeys(left_out) | parts
    overrides = {name: config for name, config in while_read.items() if name not in parts}
    if is_modular(origin.index):
        pipe = read_modular(origin.source, settings, device, classes, supplied, overrides)
    else:
        pipe = _pipeline(origin, classes, supplied, settings, device, overrides)
    for name, module in supplied.items():
        refuse_another(pipe, name, module)
    apply_marks(pipe, marks)
    for name in quantized.keys() - overrides.keys():
        is_from_file = name not in origin.replaced or is_weights(origin.replaced[name])
        if name not in while_read or (is_from_file and modules[name][0] != "transformers"):
            quantize_read(getattr(pipe, name), kinds[name], device.dtype_of(name))
    return pipe


def _origin(model: str, settings: EngineSettings) -> _Origin:
    """The sources of a pipeline's parts, from the model and settings."""
    source, whole, replaced = model, None, replacements(settings.component)
    if is_single_file(model):
        source, index, component = single_file(model, settings.model_config, settings.revision)
        if component is None:
            whole = model
        elif component in replaced:
            rule = f"{model} is the model's {component} already: leave one of them out"
            raise SettingRejected(f"component={component}={replaced[component]}: {rule}")
        else:
            replaced[component] = model
    elif settings.model_config is not None:
        rule = "it is for a MODEL that is one file"
        raise SettingRejected(f"model_config={settings.model_config!r}: {rule}")
    else:
        index = index_of(source, settings.revision)
    base = BasePipeline(source, settings.revision, pipeline_class(index))
    return _Origin(source, index, whole, replaced, base)


def _from_elsewhere(
    origin: _Origin,
    classes: Mapping[str, Any],
    component_names: Collection[str],
    device: Device,
    quantized: Mapping[str, Any],
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Read components from elsewhere; returns them, and files' marks about the training."""
    parts: dict[str, nn.Module] = {}
    marks: dict[str, Any] = {}
    if origin.whole is not None:
        names = set(component_names) - origin.replaced.keys()
        parts, marks = read_whole(
            origin.whole, classes, names, origin.base, device.dtype_of, quantized
        )
    for name in origin.replaced.keys() & set(component_names):
        parts[name], of_file = read_component(
            name,
            origin.replaced[name],
            classes[name],
            origin.base,
            dtype=device.dtype_of(name),
            quantization=quantized.get(name),
        )
        marks |= of_file if is_denoiser(name) else {}
    return parts, marks


def _pipeline(
    origin: _Origin,
    classes: Mapping[str, Any],
    supplied: Mapping[str, Any],
    settings: EngineSettings,
    device: Device,
    quantized: Mapping[str, Any],
) -> DiffusionPipeline:
    """Read a pipeline by its own class: the base class silently drops optional components.

    Its modules are read one by one: `from_pretrained` would initialize missing weights randomly.
    """
    options = {"use_safetensors": True, "revision": settings.revision, "variant": settings.variant}
    cls = pipeline_class(origin.index) or DiffusionPipeline
    parts = dict(supplied)
    if origin.index.get("_class_name") == "WanDMDPipeline":  # FastWan: not in diffusers
        parts["scheduler"] = DMDScheduler()
    folder = origin.source
    if not Path(folder).is_dir():
        folder = str(cls.download(folder, **options, **parts))
    for name in classes.keys() - supplied.keys():
        dtype, config = device.dtype_of(name), quantized.get(name)
        module = read_own(name, classes[name], folder, settings.variant, dtype, config)
        if module is not None:
            parts[name] = module
    extra = {"dtype": _dtypes(device)}
    if rest := {name: config for name, config in quantized.items() if name not in parts}:
        extra["quantization_config"] = PipelineQuantizationConfig(quant_mapping=rest)
    cls, parts = with_sampler(cls, parts)
    pipe: DiffusionPipeline = cls.from_pretrained(origin.source, **options, **extra, **parts)
    return pipe


def _dtypes(device: Device) -> Any:
    if len(device.dtypes) == 1:
        return device.dtype
    return {"default": device.dtype, **{n: t for n, t in device.dtypes.items() if n}}


def pipeline_class(index: Mapping[str, Any]) -> Any:
    """The diffusers class of a pipeline, by its index; None if diffusers has none."""
    name = str(index.get("_class_name"))
    cls = class_of("diffusers", "WanPipeline" if name == "WanDMDPipeline" else name)
    return cls if isinstance(cls, type) and issubclass(cls, DiffusionPipeline) else None


def refuse_another(pipe: Pipeline, name: str, module: nn.Module | None) -> None:
    """Refuse a pipeline that holds another module than the given one.

    A pipeline may build its own one from it (AnimateDiff's UNet), with all of its weights.

    Raises:
        LoadFailed: it does; the text names the component.
    """
    current = getattr(pipe, name, None)
    if current is module:
        return
    if isinstance(current, nn.Module) and module is not None:
        state, expected = current.state_dict(), module.state_dict()
        if all(key in state and torch.equal(state[key], value) for key, value in expected.items()):
            return
    raise LoadFailed(
        f"{type(pipe).__name__} does not take {name} from elsewhere: leave it out of component"
    )


def index_of(source: str, revision: str | None) -> dict[str, Any]:
    """The index of a plain or modular pipeline."""
    try:
        return dict(DiffusionPipeline.load_config(source, revision=revision))
    except OSError:
        try:
            return dict(ModularPipeline.load_config(source, revision=revision))
        except OSError:
            pass
        raise
