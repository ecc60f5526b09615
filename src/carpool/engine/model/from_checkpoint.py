"""Build a component from a checkpoint, with no weight missing and none left over."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import GGUFQuantizationConfig
from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from carpool import jsonfile
from carpool.engine.model.checkpoint import UNREAD, Checkpoint
from carpool.engine.model.conversion import (
    Misfit,
    converter_of,
    empty_model,
    fit,
    left_over_of,
    refuse_misfit,
    unwrapped,
    views_of,
)
from carpool.engine.model.sparse_wan import class_with
from carpool.settings.preparation import is_gguf

TEXT_PARTS = (
    ("cond_stage_model.", "conditioner.embedders.0.", "text_encoders.clip_l."),
    ("conditioner.embedders.1.", "text_encoders.clip_g."),
    ("text_encoders.t5xxl.",),
)
"""Prefixes of the first, second and third text encoder in files of whole models."""
EMBEDDINGS = ("token_embedding.weight", "embed_tokens.weight", "shared.weight")
WIDTHS = (
    "latent_channels", "hidden_size", "projection_dim", "joint_attention_dim", "text_dim",
    "text_embed_dim", "text_in_dim", "cap_feat_dim", "caption_channels",
)  # fmt: skip
"""Configuration entries that must match the other components, `cross_attention_dim` aside."""
LIBRARY_NAMES = ("diffusion_pytorch_model", "model")
"""Prefixes of the libraries' weight files in folders with a configuration."""


@dataclass(frozen=True, slots=True)
class BasePipeline:
    """The pipeline of a component: its files and its class."""

    source: str  # folder or hub id
    revision: str | None = None
    pipeline: Any = None  # None: it is assembled from blocks


def component_of(
    checkpoint: Checkpoint,
    name: str,
    cls: Any,
    base: BasePipeline,
    dtype: torch.dtype,
    quantization: Any = None,
) -> nn.Module:
    """Build a component from its weights and the configuration next to them.

    Outside of the libraries' folders, the pipeline's configuration is used.

    Raises:
        ValueError: weights are missing, left over, or of another model.
    """
    if issubclass(cls, PreTrainedModel):
        return _encoder(checkpoint, name, cls, base, dtype, quantization)
    return _model(checkpoint, name, cls, base, dtype)


def _configuration(
    file: Path, name: str, cls: Any, base: BasePipeline
) -> tuple[str, dict[str, str | None]]:
    """The folder or hub id of a component's configuration, and its place there."""
    beside = file.parent / "config.json"
    if file.name.startswith(LIBRARY_NAMES) and beside.is_file():
        config = jsonfile.loads(jsonfile.read(beside))
        kind = getattr(getattr(cls, "config_class", None), "model_type", cls.__name__)
        if kind in (config.get("_class_name"), config.get("model_type")):
            return str(file.parent), {}
    inner: dict[str, str | None] = {"subfolder": name}
    return base.source, inner | ({"revision": base.revision} if base.revision else {})


def _model(
    checkpoint: Checkpoint, name: str, cls: Any, base: BasePipeline, dtype: torch.dtype
) -> nn.Module:
    """Build a diffusers model."""
    place, inner = _configuration(checkpoint.file, name, cls, base)
    cls = class_with(cls, checkpoint.weights)
    config = cls.load_config(place, **inner)
    is_quantized = is_gguf(checkpoint.file.name)
    match = fit(checkpoint.weights, cls, config)
    refuse_misfit(cls.__name__, match.missing, match.left_over, match.other_shapes)
    mark = "__index_timestep_zero__"  # trained with timestep 0 for reference images
    if mark in checkpoint.marks and not config.get("zero_cond_t"):
        raise ValueError(
            f"it has the mark {mark}, and the configuration of this model's {name} has no "
            "zero_cond_t: take the model that the weights were made for"
        )
    if converter_of(cls) is None or not hasattr(cls, "from_single_file"):
        if is_quantized:
            raise ValueError(f"diffusers reads no {cls.__name__} from GGUF: take a .safetensors")
        return _assembled(cls, config, match.weights, dtype)
    options: dict[str, Any] = {"dtype": dtype}
    if is_quantized:
        options["quantization_config"] = GGUFQuantizationConfig(compute_dtype=dtype)
    module: nn.Module = cls.from_single_file(
        match.weights,
        config=place,
        subfolder=inner.get("subfolder"),
        config_revision=inner.get("revision"),
        **options,
    )
    return module


def _assembled(
    cls: Any, config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype
) -> nn.Module:
    """Build a model of a class that diffusers cannot read from a single file."""
    module = empty_model(cls, config)
    float32_parts = getattr(cls, "_keep_in_fp32_modules", None) or ()
    cast = {
        name: weight.to(torch.float32 if set(float32_parts) & set(name.split(".")) else dtype)
        if weight.is_floating_point()
        else weight
        for name, weight in weights.items()
    }
    module.load_state_dict(cast, assign=True)
    return module.eval()


def _encoder(
    checkpoint: Checkpoint,
    name: str,
    cls: Any,
    base: BasePipeline,
    dtype: torch.dtype,
    quantization: Any,
) -> nn.Module:
    """Build a transformers model."""
    place, inner = _configuration(checkpoint.file, name, cls, base)
    config = cls.config_class.from_pretrained(place, **inner)
    with init_empty_weights():
        empty = cls(config)
    views = views_of(checkpoint.weights)
    part = ""
    if views.keys() != {""}:
        part = next(iter(text_parts(checkpoint.weights, name, cls, base)), "")
    if part not in views:
        raise ValueError(f"it holds no {cls.__name__} of this model's size")
    weights = unwrapped(
        {key: weight for key, weight in views[part].items() if not key.endswith("logit_scale")},
        empty.state_dict(),
    )
    if any("resblocks." in key for key in weights):
        weights = _from_open_clip(weights, part, config)
    if part == "text_encoders.clip_l." and "text_projection.weight" in empty.state_dict():
        # SD 3 uses its first encoder's output unprojected: diffusers needs an identity matrix
        weights = {**weights, "text_projection.weight": torch.eye(config.hidden_size)}
    options = {} if quantization is None else {"quantization_config": quantization}
    module, report = cls.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # report them instead
        **options,
    )
    return checked(report, module)


def text_parts(weights: Mapping[str, Tensor], name: str, cls: Any, base: BasePipeline) -> list[str]:
    """Prefixes of the parts of a file that may hold an encoder, by its size.

    Parts at the encoder's usual place come first, as two encoders may have equal sizes.
    """
    inner = {"revision": base.revision} if base.revision else {}
    config = cls.config_class.from_pretrained(base.source, subfolder=name, **inner)
    with init_empty_weights():
        size = cls(config).get_input_embeddings().weight.shape
    parts = [
        part for part, view in views_of(weights).items()
        if part and any(key.endswith(EMBEDDINGS) and w.shape == size for key, w in view.items())
    ]  # fmt: skip
    return sorted(parts, key=lambda part: not is_place_of(part, name))


def is_place_of(part: str, name: str) -> bool:
    """Whether a part of a file usually holds an encoder of this name."""
    place = int(name[-1]) - 1 if name[-1].isdigit() else 0
    return part in TEXT_PARTS[min(place, len(TEXT_PARTS) - 1)]


def _from_open_clip(weights: Mapping[str, Tensor], part: str, config: Any) -> dict[str, Tensor]:
    """Convert an OpenCLIP text encoder's weights to transformers' names."""
    prefix = f"{part or 'conditioner.embedders.1.'}model."  # SD 2 omits the last layer
    prefixed = {f"{prefix}{key}": weight for key, weight in weights.items()}
    converted: dict[str, Tensor] = convert_open_clip_checkpoint(
        SimpleNamespace(config=config), prefixed, prefix=prefix
    )
    return converted


def gguf_encoder(
    file: Path, cls: Any, base: BasePipeline, name: str, dtype: torch.dtype
) -> nn.Module:
    """Read a text encoder from GGUF. Weights are dequantized: transformers keeps no blocks.

    Raises:
        ValueError: weights are missing, left over, or of another size than the pipeline's.
    """
    module, report = cls.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=dtype, output_loading_info=True
    )
    refuse_size(checked(report, module), name, cls, base, "num_hidden_layers")
    result: nn.Module = module
    return result


def refuse_size(module: Any, name: str, cls: Any, base: BasePipeline, *extra_entries: str) -> None:
    """Refuse a component whose widths, or extra entries, are not those of the pipeline's own.

    Raises:
        ValueError: an entry differs; the text names it.
    """
    if not (Path(base.source) / name / "config.json").is_file():
        return  # assembled from blocks, or on the hub
    if isinstance(module, PreTrainedModel):
        config = cls.config_class.from_pretrained(base.source, subfolder=name)
    else:
        config = SimpleNamespace(**cls.load_config(base.source, subfolder=name))
    is_inner = getattr(config, "caption_channels", None) is not None  # texts are projected to it
    for entry in (*WIDTHS, *extra_entries, *([] if is_inner else ["cross_attention_dim"])):
        actual, rule = getattr(module.config, entry, None), getattr(config, entry, None)
        if actual != rule and None not in (actual, rule):
            raise ValueError(f"its {entry} is {actual}, and {rule} in this model's {name}")


def from_folder(cls: Any, place: str, **options: Any) -> nn.Module:
    """Read a module by its own class, and check that no weights are missing or left over.

    The libraries initialize missing weights randomly, and drop those left over.

    Args:
        place: a folder or hub id.

    Raises:
        Misfit: a weight is missing, left over, or of another shape; the text names it.
    """
    options |= {"use_safetensors": True, "output_loading_info": True}
    folder, variant = Path(place, options.get("subfolder", "")), options.get("variant") or ""
    cls = class_with(cls, _names_in(folder, variant))
    module, report = cls.from_pretrained(place, **options)
    if (sibling := class_with(cls, report["unexpected_keys"])) is not cls:  # a hub model
        module, report = sibling.from_pretrained(place, **options)
    if getattr(module.config, "quantization_config", None) is None:
        for name in _names_in(folder, variant, {"I8", "U8"}):
            raise Misfit(UNREAD.format(name, "8-bit integers without their scales"))
    return checked(report, module)


def _names_in(folder: Path, variant: str, dtypes: Container[str] = ()) -> Iterator[str]:
    """The names of a variant's weights in a local folder, all or of some dtypes; none of a hub."""
    files = folder.glob("*.safetensors")  # such as model.fp16-00001-of-00002.safetensors
    for file in [f for f in files if f.stem.partition(".")[2].partition("-")[0] == variant]:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if not dtypes or opened.get_slice(name).get_dtype() in dtypes:
                    yield name


def checked(report: Mapping[str, Any], module: nn.Module) -> nn.Module:
    """Refuse a module that was loaded with weights missing or left over; returns it.

    Args:
        report: `output_loading_info` of diffusers or transformers.

    Raises:
        Misfit: a weight is missing, left over, or of another shape; the text names it.
    """
    refuse_misfit(
        type(module).__name__,
        sorted(report["missing_keys"]),
        left_over_of(report["unexpected_keys"], module),
        [
            f"{name} is {tuple(file)} and must be {tuple(model)}"
            for name, file, model in sorted(report["mismatched_keys"])
        ],
    )
    return module
