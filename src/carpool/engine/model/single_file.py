"""A MODEL in one file: find its configuration and its components."""

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.single_file_utils import fetch_diffusers_config
from safetensors import safe_open
from torch import Tensor, nn

from carpool.engine.model.checkpoint import (
    Checkpoint,
    is_pth,
    marks_in,
    plain_names,
    read_checkpoint,
    read_pth,
    refuse_adapter,
    shards_of,
)
from carpool.engine.model.conversion import is_harmless, part_of, some
from carpool.engine.model.files import local_file, reading
from carpool.engine.model.from_checkpoint import BasePipeline, component_of, is_place_of, text_parts
from carpool.engine.model.turbo_wan import as_wan, base_of, is_turbo_wan
from carpool.errors import LoadFailed
from carpool.models.source import check_hub, find, index_of
from carpool.request.adapter_names import expert_of
from carpool.settings.preparation import is_denoiser, is_gguf

logger = logging.getLogger(__name__)

LEFT_OUT = "safety_checker"
"""Left out, as in diffusers: a single-file model has none."""
_OF_PARTS = {
    "vae": ("first_stage_model.", "vae."),
    "audio_vae": ("audio_vae.",),
    "vocoder": ("vocoder.",),
    "controlnet": ("control_model.",),
    "connectors": ("connectors.",),
}


def single_file(
    file: str, config: str | None, revision: str | None
) -> tuple[str, dict[str, Any], str | None]:
    """Find out how to read a single-file model.

    Args:
        config: folder or hub id that has everything but the file's weights; None: the pipeline in
            whose folder the file is, else inferred.

    Returns:
        The folder or hub id of the configuration; its index; and the component in the file, or
        None if it holds several.

    Raises:
        LoadFailed: it is no model, or there is no configuration.
    """
    names = weights_of(file)
    config = config or _folder_of(Path(file))
    rule = "was inferred; --model-config gives another: "
    context = "" if config else f"the configuration of {file} {rule}"
    try:
        source, extra = find(config or config_of(file, names))
        if not extra:
            check_hub(source, revision)
        index = dict(DiffusionPipeline.load_config(source))
    except (LoadFailed, OSError, ValueError) as error:
        raise LoadFailed(f"{context}{error}") from error
    if {part_of(name) for name in names if not is_harmless(name)} - {"model.diffusion_model.", ""}:
        return source, index, None
    parts = [name for name, p in index.items() if isinstance(p, (list, tuple)) and p[0]]
    denoisers = [name for name in parts if is_denoiser(name)]
    if not denoisers:
        raise LoadFailed(f"{source} has neither a transformer nor a UNet for {file}")
    part = min(denoisers, key=lambda name: name not in ("transformer", "unet"))
    if "transformer_2" in denoisers:
        part = "transformer_2" if expert_of(Path(file).stem) == 1 else "transformer"
        sibling = {"transformer": "transformer_2", "transformer_2": "transformer"}[part]
        logger.warning("%s is taken as %s; %s is that of %s: --component %s=FILE gives another",
                       file, part, sibling, source, sibling)  # fmt: skip
    return source, index, part


def _folder_of(file: Path) -> str | None:
    """The pipeline folder that contains a file, such as `transformer/model.safetensors`."""
    folders = (file.parent, file.parent.parent)
    return next((str(folder) for folder in folders if index_of(folder) is not None), None)


def config_of(file: str, weights: Mapping[str, Tensor]) -> str:
    """The hub id of a single-file model's configuration, as inferred by diffusers.

    Raises:
        LoadFailed: the file belongs to no model known to diffusers.
    """
    if (base := base_of(weights)) is not None:
        return base
    bare = {name.removeprefix("diffusion_model."): weight for name, weight in weights.items()}
    try:
        return str(fetch_diffusers_config(bare)["pretrained_model_name_or_path"])
    except (KeyError, IndexError, AttributeError, UnboundLocalError) as error:
        raise LoadFailed(
            f"{file} is of no model that diffusers knows: give --model-config"
        ) from error


def weights_of(file: str) -> dict[str, Tensor]:
    """Names and shapes of the weights of a file and its shards, as tensors without memory.

    Raises:
        LoadFailed: the file cannot be read, or is an adapter.
    """
    shapes: dict[str, Any] = {}
    with reading(file):
        for shard in shards_of(file):
            shapes |= _shapes(str(local_file(shard)))
        if not shapes:
            raise ValueError("it holds no weights")
        refuse_adapter(shapes)
    names = plain_names(shapes)
    marks = marks_in(names.values())
    weights = {
        plain: torch.empty(shapes[name], device="meta")
        for name, plain in names.items()
        if plain not in marks
    }
    return as_wan(weights) if is_turbo_wan(weights) else weights


def _shapes(file: str) -> dict[str, Any]:
    if is_gguf(file):
        from gguf import GGUFReader

        return {tensor.name: tensor.shape.tolist()[::-1] for tensor in GGUFReader(file).tensors}
    if is_pth(file):
        return {name: tensor.shape for name, tensor in read_pth(Path(file), "meta").items()}
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118


def read_whole(
    file: str,
    classes: Mapping[str, Any],
    names: Collection[str],
    base: BasePipeline,
    dtype_of: Callable[[str], torch.dtype],
    quantized: Mapping[str, Any],
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Read the components in a file; the others come from the configuration's pipeline.

    Args:
        names: names of the modules to read; `classes` are those of all modules.

    Returns:
        Components by name; and the file's marks about the model's training.

    Raises:
        LoadFailed: a part fits no component, or weights are missing.
    """
    modules = {}
    with reading(file):
        files = [local_file(shard) for shard in shards_of(file)]
        dtypes = {dtype_of(name) for name in classes}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        checkpoint = read_checkpoint(files, dtype)
        for name, weights in components_in(checkpoint, classes, base).items():
            if name in names:
                part = Checkpoint(checkpoint.file, weights, checkpoint.marks)
                modules[name] = component_of(
                    part, name, classes[name], base, dtype_of(name), quantized.get(name)
                )
    missing = ", ".join(name for name in names if name not in modules)
    if missing:
        logger.info("%s has no %s: taken from %s", file, missing, base.source)
    return modules, checkpoint.marks


def components_in(
    checkpoint: Checkpoint, classes: Mapping[str, Any], base: BasePipeline
) -> dict[str, dict[str, Tensor]]:
    """The weights of each component in a file, by the file's own names.

    Raises:
        ValueError: a part of the file belongs to no component.
    """
    by_part: dict[str, dict[str, Tensor]] = {}
    for name, weight in checkpoint.weights.items():
        by_part.setdefault(part_of(name), {})[name] = weight
    denoisers = [name for name in ("transformer", "unet") if name in classes]
    bare = ("",) if any(not is_harmless(name) for name in by_part.get("", ())) else ()
    prefixes = {**_OF_PARTS, **dict.fromkeys(denoisers, ("model.diffusion_model.", *bare))}
    parts = {
        name: next(part for part in parts if part in by_part)
        for name, parts in prefixes.items()
        if name in classes and by_part.keys() & set(parts)
    }
    able = [
        (name, part)
        for name, cls in classes.items()
        if name.startswith("text_encoder")
        for part in text_parts(checkpoint.weights, name, cls, base)
    ]
    for name, part in sorted(able, key=lambda pair: not is_place_of(pair[1], pair[0])):
        if name not in parts and part not in parts.values():
            parts[name] = part
    loose = [n for n in checkpoint.weights if part_of(n) not in parts.values()]
    if loose := [name for name in loose if not is_harmless(name)]:
        rule = f"which none of this model's components takes: {', '.join(classes)}"
        raise ValueError(f"it has {some(loose)}, {rule}")
    if not parts.keys() & set(denoisers):
        names = ", ".join(parts) or some(checkpoint.weights)
        rule = f"{' or '.join(denoisers) or 'denoiser'}: say --component NAME=FILE beside a MODEL"
        raise ValueError(f"it holds {names} and no {rule}")
    return {name: by_part[part] for name, part in parts.items()}
