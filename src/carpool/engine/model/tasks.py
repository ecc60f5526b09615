"""The tasks of a loaded pipeline: its own, and those of sister pipelines over the same modules.

Diffusers has one pipeline class per task (text-to-image, image-to-image, inpaint, ...) over the
same modules. All of them are offered, and since the modules are shared, requests of different
tasks share forwards.
"""

import copy
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import diffusers
from diffusers import ConfigMixin, ModularPipeline
from torch import nn

from carpool.engine.model.modular import Pipeline, guidance, workflows
from carpool.engine.model.output_types import only_converts, output_types
from carpool.engine.model.signature import parameter_of, parameters_of, source_of
from carpool.request.card import Parameter, Task

# Prefixes of pipelines whose modules also fit `...Img2ImgPipeline` and `...InpaintPipeline`.
# Diffusers' AutoPipelines know them, too, but take half a second to import.
LINKED = [
    "Flux", "FluxControl", "FluxControlNet", "IF", "Kandinsky3", "KandinskyCombined",
    "KandinskyV22Combined", "Kolors", "LatentConsistencyModel", "QwenImage", "StableDiffusion",
    "StableDiffusion3", "StableDiffusion3ControlNet", "StableDiffusion3PAG",
    "StableDiffusionControlNet", "StableDiffusionControlNetPAG", "StableDiffusionPAG",
    "StableDiffusionXL", "StableDiffusionXLControlNet", "StableDiffusionXLControlNetPAG",
    "StableDiffusionXLControlNetUnion", "StableDiffusionXLPAG", "ZImage",
]  # fmt: skip
# Further pipelines that use the same modules.
SISTERS = {
    "LTX2Pipeline": ("LTX2ImageToVideoPipeline",),
    "WanPipeline": ("WanImageToVideoPipeline",),  # one model does both, such as TI2V 5B
}
# Max reference images of a request, for pipelines with several; from the models' own pages.
MAX_IMAGES = {
    "Flux2Pipeline": 10, "QwenImageEditPlusPipeline": 3,
    **dict.fromkeys(("Flux2KleinPipeline", "Flux2KleinKVPipeline", "GlmImagePipeline",
                     "BriaFibo2Pipeline", "QwenImage21Pipeline", "ZImageOmniPipeline"), 4),
    "SeeingTextPipeline": 16,  # images of a conversation
}  # fmt: skip


def tasks_of(pipe: Pipeline) -> dict[str, tuple[Task, Pipeline]]:
    """The pipeline's own task first, then those of its sisters, by name."""
    if isinstance(pipe, ModularPipeline):
        return {task.name: (task, pipe) for task in _workflows(pipe)}
    tasks: dict[str, tuple[Task, Pipeline]] = {}
    configs = {
        name: module._internal_dict
        for name, module in pipe.components.items()
        if isinstance(module, nn.Module) and hasattr(module, "_internal_dict")
    }
    try:
        for sister in (pipe, *_sisters(_with_own_helpers(pipe))):
            task = _task(sister)
            tasks.setdefault(task.name, (task, sister))
    finally:
        for name, config in configs.items():  # some constructors write deprecations into them
            if pipe.components[name]._internal_dict is not config:
                pipe.components[name]._internal_dict = config
    return tasks


def _with_own_helpers(pipe: Pipeline) -> Pipeline:
    """Copy a pipeline's helpers, not its modules: constructors rewrite a scheduler's config."""
    donor = copy.copy(pipe)
    for name, component in pipe.components.items():
        if isinstance(component, ConfigMixin) and not isinstance(component, nn.Module):
            vars(donor)[name] = copy.deepcopy(component)
    return donor


def _sisters(pipe: Pipeline) -> Iterator[Pipeline]:
    name = type(pipe).__name__
    if "mage" in name.replace("ImagePipeline", ""):
        return  # it already starts from an image
    for linked in linked_pipelines(name):
        cls = getattr(diffusers, linked)
        try:
            sister = cls(**_fitting(cls, pipe))
        except (ValueError, AttributeError, TypeError):
            continue  # it needs missing modules
        yield sister
    if name == "WanPipeline" and not pipe.config.get("expand_timesteps"):
        return
    for sister_name in SISTERS.get(name, ()):
        yield getattr(diffusers, sister_name)(**_fitting(getattr(diffusers, sister_name), pipe))


def linked_pipelines(name: str) -> list[str]:
    """The image-to-image and inpainting classes for the modules of a pipeline class."""
    match = re.fullmatch(r"(\w+?)(Img2Img|Inpaint|Inpainting)?(Combined)?Pipeline", name)
    if not match or match[1] + (match[3] or "") not in LINKED:
        return []
    sisters = (f"{match[1]}{does}{match[3] or ''}Pipeline" for does in _DOES if does != match[2])
    return [sister for sister in sisters if sister in _exported()]


@cache
def _exported() -> frozenset[str]:
    """The exported names of diffusers, cached because `dir` rebuilds the list each time."""
    return frozenset(dir(diffusers))


_DOES = ("Img2Img", "Inpaint", "Inpainting")


def _fitting(cls: type, pipe: Pipeline) -> dict[str, Any]:
    """The modules and settings of another pipeline that fit this class's constructor."""
    names = inspect.signature(cls).parameters
    have = {**pipe.config, **pipe.components}
    return {name: value for name, value in have.items() if name in names}


def _task(pipe: Pipeline) -> Task:
    cls: Any = type(pipe)
    parameters, name = parameters_of(pipe), cls.__name__
    controls = getattr(pipe, "controlnet", getattr(pipe, "adapter", None))  # each with an image
    nets = getattr(controls, "nets", getattr(controls, "adapters", ()))
    denoiser = getattr(pipe, "unet", getattr(pipe, "transformer", None))
    config = getattr(denoiser, "config", None)
    if getattr(config, "encoder_hid_dim_type", None) == "ip_image_proj":  # it has an IP-adapter
        needed = {p.name for p in parameters if p.required} | {"ip_adapter_image"}
        parameters = tuple([replace(p, required=p.name in needed) for p in parameters])
    return Task(
        name=getattr(cls, "task", "") or _name(cls, {parameter.name for parameter in parameters}),
        pipeline=name, parameters=parameters, max_images=max(MAX_IMAGES.get(name, 1), len(nets)),
        image_mode=getattr(cls, "image_mode", "RGBA" if "Layered" in name else "RGB"),
        strength_rounds=_strength_rounds(pipe),
        output_types=output_types(cls), only_converts=only_converts(pipe),
        needs_prompt="prompt is None and prompt_embeds is None" in source_of(cls, "check_inputs"),
    )  # fmt: skip


def _workflows(pipe: ModularPipeline) -> Iterator[Task]:
    name = type(pipe).__name__
    extra = [Parameter("output", "other")]  # Python only: JSON has no tensors
    extra += [Parameter(name, "float", default=scale) for name, scale in guidance(pipe).items()]
    for task, inputs in workflows(pipe).items():
        yield Task(
            task, name, parameters=(*map(parameter_of, inputs), *extra),
            max_images=MAX_IMAGES["Flux2Pipeline"] if task == "edit" else 1,  # checked by blocks
            image_mode="RGBA" if "Layered" in name else "RGB",
            needs_prompt=False,  # unless a block requires it
        )  # fmt: skip


def _strength_rounds(pipe: Pipeline) -> Literal["up", "down"] | None:
    """Whether half a step counts, by the pipeline's own arithmetic.

    None if it has none, or if its scheduler adds steps: PNDM's first step is two.
    """
    choose = getattr(type(pipe), "get_timesteps", None)
    scheduler = copy.deepcopy(getattr(pipe, "scheduler", None))
    if choose is None or scheduler is None:
        return None
    try:
        scheduler.set_timesteps(10)
        stub = types.SimpleNamespace(timesteps=scheduler.timesteps, order=scheduler.order)
    except (ValueError, TypeError, AttributeError):  # it needs the image's size, or has no order
        stub = types.SimpleNamespace(timesteps=range(10), order=1)
    arguments = {"num_inference_steps": 10, "timesteps": stub.timesteps, "device": None}
    names = inspect.signature(choose).parameters
    arguments = {name: value for name, value in arguments.items() if name in names}
    try:
        empty, half = (
            choose(types.SimpleNamespace(scheduler=stub), **arguments, strength=strength)[0]
            for strength in (0.0, 0.05)
        )
    except (TypeError, AttributeError):
        return None  # it counts in another way
    if len(empty):
        return None
    return "up" if len(half) else "down"


def _name(cls: Any, parameters: set[str]) -> str:
    pipeline, output = cls.__name__, str(cls.__call__.__annotations__.get("return", ""))
    if "mesh" in output.lower() or "mesh" in output_types(cls):
        return "image-to-mesh" if "image" in parameters else "text-to-mesh"
    if "AudioPipelineOutput" in output:
        return "text-to-audio"
    if "mask_image" in parameters:
        return "inpaint"
    if "num_frames" in parameters:
        return "image-to-video" if "image" in parameters else "text-to-video"
    if any(name.startswith("audio_") for name in parameters):
        return "text-to-audio"
    if "strength" in parameters and "image" in parameters:
        return "image-to-image"
    edits = ("Kontext", "Edit", "Layered")
    return "edit" if any(word in pipeline for word in edits) else "text-to-image"
