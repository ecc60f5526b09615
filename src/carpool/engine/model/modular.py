"""Modular pipelines, which diffusers assembles from blocks (`ModularPipeline`).

The parameters of a modular pipeline are its blocks' inputs, and the given inputs select the blocks
that run: one pipeline generates, edits and inpaints images. Its workflows are described as tasks; a
request calls the pipeline itself, with all of its blocks.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.modular_pipelines import ComponentSpec
from torch import nn

from carpool.config import EngineSettings
from carpool.engine.foreign_code import all_blocks
from carpool.engine.model.artifacts import OUTPUTS
from carpool.engine.model.conversion import Misfit
from carpool.engine.model.device import Device
from carpool.engine.model.from_checkpoint import from_folder
from carpool.errors import LoadFailed
from carpool.models.source import is_weights
from carpool.request.images import NAMES as PICTURE_NAMES

Pipeline: TypeAlias = DiffusionPipeline | ModularPipeline

_RESULTS = ("images", "image", "videos", "video", "frames", "audio", "audios", "sound",
            "sampling_rate", "latents")  # fmt: skip
_GUIDERS = {"guidance_scale": "guider", "guidance_scale_2": "guider_2"}


def is_modular(index: Mapping[str, Any]) -> bool:
    """Whether an index belongs to a modular pipeline."""
    return "_blocks_class_name" in index


def read_modular(
    source: str,
    settings: EngineSettings,
    device: Device,
    modules: Collection[str],
    supplied: Mapping[str, nn.Module | None],
    quantized: Mapping[str, Any],
) -> ModularPipeline:
    """Read a modular pipeline: each component from the place in its index.

    Args:
        source: a folder or a hub id.
        modules: names of the components that are modules.
        supplied: modules that are already loaded; None: left out.
        quantized: quantization configurations by component.

    Raises:
        ValueError: a component cannot be read.
        LoadFailed: the blocks are custom code of the repository.
    """
    try:
        pipe = ModularPipeline.from_pretrained(source, revision=settings.revision)
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        raise LoadFailed(
            f"{source}: its blocks are code of the repository, which is not run: load it in a "
            "function of your own that returns the pipeline, and serve that with --pipeline"
        ) from error
    parts = {name: module for name, module in supplied.items() if module is not None}
    pipe.update_components(**parts)
    for name in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(name)
        if name in supplied or spec.pretrained_model_name_or_path is None:
            continue
        how: dict[str, Any] = {}
        if spec.pretrained_model_name_or_path == source:
            how["revision"] = settings.revision
        if name in modules:
            how["dtype"] = device.dtype_of(name)
            how |= {} if settings.variant is None else {"variant": settings.variant}
            how |= {"quantization_config": quantized[name]} if name in quantized else {}
        pipe.register_components(**{name: _loaded(spec, how, is_module=name in modules)})
    return pipe


def _loaded(spec: ComponentSpec, how: Mapping[str, Any], *, is_module: bool) -> Any:
    """Read a component from the place in its specification; modules with all weights.

    Raises:
        LoadFailed: weights are missing or left over.
    """
    place = spec.pretrained_model_name_or_path
    if not is_module or spec.type_hint is None or place is None or is_weights(place):
        return spec.load(**how, **({"use_safetensors": True} if is_module else {}))
    where = {name: value for name in spec.loading_fields() if (value := getattr(spec, name, None))}
    del where["pretrained_model_name_or_path"]
    try:
        module: Any = from_folder(spec.type_hint, place, **{**where, **how})
    except Misfit as error:
        raise LoadFailed(f"{spec.name} of {place} cannot be read: {error}") from error
    module._diffusers_load_id = spec.load_id  # set by `spec.load`, too
    return module


def workflows(pipe: ModularPipeline) -> dict[str, list[Any]]:
    """The tasks of a pipeline, by name, with their inputs (`InputParam`).

    A task has the blocks' inputs, except images that none of its workflows reads. An input is
    required if all of them require it. Tasks with fewer images come first.
    """
    blocks = pipe.blocks
    try:
        parts = [blocks.get_workflow(name) for name in blocks.available_workflows]
        named = [{entry.name: entry for entry in part.inputs if entry.name} for part in parts]
    except NotImplementedError:  # blocks without workflows
        fields = [parameter for parameter in blocks.inputs if parameter.name]
        named = [{i.name: replace(i, required=i.required and i.name == "prompt") for i in fields}]
    by_task: dict[str, list[dict[str, Any]]] = {}
    for inputs in named:
        by_task.setdefault(_task(inputs, set(blocks.output_names)), []).append(inputs)
    all_inputs = {parameter.name: parameter for parameter in blocks.inputs if parameter.name}
    return {
        task: _merged(all_inputs, workflows)
        for task, workflows in sorted(by_task.items(), key=lambda item: _pictures(item[1]))
    }


def _task(inputs: Collection[str], products: set[str]) -> str:
    has_picture = "image" in inputs
    if products & {"videos", "video", "frames"}:
        return "image-to-video" if has_picture else "text-to-video"
    if not products & {"images", "image"} and products & {"audio", "audios", "sound"}:
        return "text-to-audio"
    if "mask_image" in inputs:
        return "inpaint"
    if has_picture:
        return "image-to-image" if "strength" in inputs else "edit"
    return "text-to-image"


def _pictures(workflows: list[dict[str, Any]]) -> int:
    return max(sum(name in inputs for name in PICTURE_NAMES) for inputs in workflows)


def _merged(all_inputs: Mapping[str, Any], workflows: list[dict[str, Any]]) -> list[Any]:
    task_inputs = {name: entry for inputs in reversed(workflows) for name, entry in inputs.items()}
    return [
        replace(parameter, required=all(name in i and i[name].required for i in workflows))
        for name, parameter in {**all_inputs, **task_inputs}.items()
        if name in task_inputs or name not in PICTURE_NAMES
    ]


def guidance(pipe: ModularPipeline) -> dict[str, float]:
    """Guidance parameters that the pipeline's guiders have, though no block has them."""
    input_names = pipe.blocks.input_names
    guiders = {name: getattr(pipe, part, None) for name, part in _GUIDERS.items()}
    scales = {name: getattr(guider, "guidance_scale", None) for name, guider in guiders.items()}
    return {
        name: float(scale)
        for name, scale in scales.items()
        if name not in input_names and isinstance(scale, (int, float))
    }


def run(
    pipe: ModularPipeline, arguments: Mapping[str, Any], note: Callable[[str], object] = str
) -> dict[str, Any]:
    """Call a request's own copy of a pipeline.

    Args:
        arguments: of its `__call__`; guidance without a block is set on the copy's guiders.
        note: called with the prompt that a block has rewritten.

    Returns:
        The blocks' outputs, or those listed in `output`, under the names used by other
        pipelines.
    """
    remaining = dict(arguments)
    output = remaining.pop("output", None) or outputs(pipe)
    if any(name in remaining for name in _GUIDERS):
        for name in guidance(pipe).keys() & remaining.keys():
            if (scale := remaining.pop(name)) is not None:
                getattr(pipe, _GUIDERS[name]).guidance_scale = scale
    names = [output] if isinstance(output, str) else list(output)
    results = pipe(output=[*names, "prompt"], **remaining)
    if any("prompt" in block.intermediate_output_names for block in all_blocks(pipe._blocks)):
        text = results["prompt"][0] if isinstance(results["prompt"], list) else results["prompt"]
        if isinstance(text, str) and text != remaining.get("prompt"):
            note(text)
    return {OUTPUTS.get(name, name): results[name] for name in names}


def call_plainly(pipe: Pipeline, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run a call in plain diffusers; returns the outputs by field."""
    if not isinstance(pipe, ModularPipeline):
        pipe.set_progress_bar_config(disable=True)
        return dict(pipe(**arguments))
    pipe_copy = copy.copy(pipe)
    for name in ("_blocks", *_GUIDERS.values()):
        vars(pipe_copy)[name] = copy.deepcopy(getattr(pipe, name, None))
    silence(pipe_copy._blocks)
    return run(pipe_copy, arguments)


def outputs(pipe: ModularPipeline) -> list[str]:
    """The results among the blocks' outputs, else the outputs of the last block."""
    names: list[str] = pipe.blocks.output_names
    last = [*pipe.blocks.sub_blocks.values()][-1:]
    return [name for name in names if name in _RESULTS] or (last[0].output_names if last else names)


def silence(blocks: Any) -> None:
    """Disable the blocks' progress bars."""
    for block in all_blocks(blocks):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
