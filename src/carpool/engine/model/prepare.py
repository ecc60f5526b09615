"""Prepare a pipeline as settings say: number types, quantization, devices, attention, compiling.

The steps, in their order:

1. `read`: from files, with number types, quantized weights and components from elsewhere; then
   `carpool.engine.weights` moves weights to the device, or streams them there;
2. `apply`, on a pipeline that is there: float8 storage, components on other devices, attention
   back ends, tiled decodes, compiled blocks;
3. `warm_up`: every kernel and graph runs before the first request.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch import nn
from tqdm.auto import tqdm

from carpool.config import EngineSettings
from carpool.engine.intercept import methods_of
from carpool.engine.model.border import at_border
from carpool.engine.model.device import Device
from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.files import class_of, modules_of, read_component, single_file
from carpool.engine.model.quantize import kinds_of, quantization_of, store_as_float8
from carpool.errors import LoadFailed, SettingRejected, nearest
from carpool.models.source import is_single_file
from carpool.preparation import (
    DEFAULT_SIZE,
    by_component,
    check_components,
    check_packages,
    is_denoiser,
    replacements,
    sizes,
)

log = logging.getLogger("carpool")

GRAPHS = 64  # of one block, at most
COMPILER = "inductor"  # of torch.compile
WARMUP_STEPS = 2  # the first step of a scheduler may differ from the others
SHORT, LONG = "a cat", "an astronaut who rides a horse over the moon in the rain"
WARMUP_PROMPTS = ((SHORT,), (LONG,), (LONG, LONG), (SHORT, LONG), (SHORT, LONG, LONG))
"""Graphs are made for one row and for many, one length and many, with masks and without."""


def read(
    source: str,
    settings: EngineSettings,
    device: Device,
    only: Collection[str] | None = None,
    begin: Callable[[str, Mapping[str, type]], object] = lambda source, classes: None,
) -> DiffusionPipeline:
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
        index = dict(DiffusionPipeline.load_config(source, revision=settings.revision))
    modules = modules_of(index)
    check_components(settings, modules)
    begin(source, {name: class_of(*where) for name, where in modules.items()})
    left_out = {name for name in modules if only is not None and name not in only}
    quantized = {
        name: quantization_of(kind, modules[name][0], device.dtype_of(name))
        for name, kind in kinds_of(settings, modules).items()
        if name not in left_out
    }
    quantized = {name: config for name, config in quantized.items() if config is not None}
    given: dict[str, Any] = dict.fromkeys(left_out) | {
        name: read_component(
            name,
            where,
            modules[name],
            source,
            dtype=device.dtype_of(name),
            quantization=quantized.pop(name, None),
            revision=settings.revision,
        )
        for name, where in replaced.items()
        if name not in left_out
    }
    return _pipeline(source, index, whole, {**given, **_common(settings, device, quantized)})


def _common(
    settings: EngineSettings, device: Device, quantized: Mapping[str, Any]
) -> dict[str, Any]:
    """What all components are read with."""
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
        if "quantization_config" in given or isinstance(given["dtype"], dict):
            raise SettingRejected(
                f"{whole} is a whole model in one file, which is read in one number type and "
                "unquantized: save it as a folder (save_pretrained) for more"
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
    pipe: DiffusionPipeline,
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
        _set_attention(modules, settings.attention_backend, undo)
    if settings.vae_tiling:
        _set_tiling(modules, undo)
    if settings.compile:
        _compile(modules, undo)


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


def _set_attention(modules: Mapping[str, nn.Module], backend: str, undo: ExitStack) -> None:
    """Set how denoisers compute attention.

    diffusers keeps the last choice as the default of the whole process, too: that is put back.
    """
    known = [one.value for one in AttentionBackendName]
    if backend not in known:
        raise SettingRejected(
            f"attention_backend={backend!r}: diffusers knows no such{nearest(backend, known)}: it "
            f"has {', '.join(known)}"
        )
    able = {n: m for n, m in modules.items() if hasattr(m, "set_attention_backend")}
    denoisers = {name: module for name, module in able.items() if is_denoiser(name)}
    if not any(list(_processors(module)) for module in denoisers.values()):
        raise SettingRejected(
            f"attention_backend={backend!r}: the denoisers of this model take no other than "
            "PyTorch's own: leave it out"
        )
    for module in denoisers.values():
        before = [(one, one._attention_backend) for one in _processors(module)]
        undo.callback(_set_processors, before)
        try:
            with attention_backend(AttentionBackendName.NATIVE):  # restores the default at its end
                module.set_attention_backend(backend)  # type: ignore[operator]
        except (RuntimeError, ImportError, ValueError, OSError) as error:
            raise SettingRejected(f"attention_backend={backend!r}: {error}") from error


def _processors(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if hasattr(processor := getattr(part, "processor", None), "_attention_backend"):
            yield processor


def _set_processors(before: list[tuple[Any, Any]]) -> None:
    for processor, backend in before:
        processor._attention_backend = backend


def _set_tiling(modules: Mapping[str, nn.Module], undo: ExitStack) -> None:
    able = [module for module in modules.values() if hasattr(module, "enable_tiling")]
    if not able:
        raise SettingRejected("vae_tiling: this model's autoencoder has no tiles: leave it out")
    for module in able:
        undo.callback(setattr, module, "use_tiling", getattr(module, "use_tiling", False))
        module.enable_tiling()  # type: ignore[operator]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a denoiser that are worth compiling: what there is several times of one class.

    diffusers names them for most classes (`_repeated_blocks`); else they are the entries of lists.
    """
    if names := getattr(module, "_repeated_blocks", None):
        return [part for part in module.modules() if type(part).__name__ in names]
    lists = (part for part in module.children() if isinstance(part, nn.ModuleList))
    return [block for blocks in lists for block in blocks]


def _compile(modules: Mapping[str, nn.Module], undo: ExitStack) -> None:
    blocks = [
        block
        for name, module in modules.items()
        if is_denoiser(name)
        for block in repeated_blocks(module)
    ]
    if not blocks:
        raise SettingRejected("compile: the model has no repeated blocks: leave it out")
    limits = torch._dynamo.config  # graphs of one block: sizes, lengths, masks; then eager for good
    undo.callback(setattr, limits, "recompile_limit", limits.recompile_limit)
    limits.recompile_limit = max(GRAPHS, limits.recompile_limit)
    # hooks of adapters come later: without guards, compiled blocks would never see them
    undo.callback(setattr, limits, "skip_nnmodule_hook_guards", limits.skip_nnmodule_hook_guards)
    limits.skip_nnmodule_hook_guards = False
    for block in blocks:
        undo.callback(setattr, block, "_compiled_call_impl", block._compiled_call_impl)
        block.compile(backend=COMPILER)


def warm_up(pipe: DiffusionPipeline, settings: EngineSettings, device: Device) -> None:
    """Run the pipeline once for every size and width, as the engine's thread will.

    Compiled graphs are made for threads of the same settings (number of threads, gradients off),
    so it is a thread of its own that runs them.

    Raises:
        LoadFailed: a run failed.
    """
    wanted = sizes(settings.warmup) or ([DEFAULT_SIZE] if settings.compile else [])
    if not wanted:
        return
    failed: list[BaseException] = []
    parameters = sum(
        weight.numel()
        for module in pipe.components.values()
        if isinstance(module, nn.Module)
        for weight in module.parameters()
    )

    bars = getattr(pipe, "_progress_bar_config", {})

    def run() -> None:
        device.enter(parameters)
        torch.set_grad_enabled(False)
        try:
            pipe.set_progress_bar_config(disable=True)
            for call in tqdm(list(_calls(pipe, wanted)), desc="Warming up", unit="run"):
                call()
        except Exception as error:  # whatever a pipeline raises
            failed.append(error)
        finally:
            pipe.set_progress_bar_config(**bars)

    thread = threading.Thread(target=run, name="carpool-warm-up", daemon=True)
    thread.start()
    thread.join()
    if failed:
        [error] = failed
        raise LoadFailed(f"the warm-up failed: {type(error).__name__}: {error}") from error


def _calls(pipe: DiffusionPipeline, wanted: list[tuple[int, int]]) -> Iterator[partial[Any]]:
    takes = signature(pipe.__call__).parameters
    for width_px, height_px in wanted:
        size = {"width": width_px, "height": height_px} if width_px else {}
        for prompts in WARMUP_PROMPTS:
            given = {
                "prompt": list(prompts),
                "num_inference_steps": WARMUP_STEPS,
                "output_type": "pt",
                "generator": torch.Generator().manual_seed(0),
                **size,
            }
            yield partial(pipe, **{name: one for name, one in given.items() if name in takes})
