"""Read a file's weights under plain names: shards joined, name prefixes removed, scales applied.

Tools add prefixes to names of weights (`_orig_mod.` by torch.compile, `module.` by data
parallelism), store float8 weights with separate scales, and add entries that describe the model's
training. `read_checkpoint` leaves only weights of modules, and drops none.
"""

import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from carpool import jsonfile
from carpool.engine.model.turbo_wan import as_wan, is_turbo_wan
from carpool.settings.preparation import is_gguf

SCALES = (".scale_weight", ".weight_scale")
"""Suffixes of a layer's scale: the weight is its float8 value times the scale."""
INPUT_SCALES = (".scale_input", ".input_scale")
"""Suffixes of activation scales for float8 products; unused after weights are unscaled."""
_FLOAT8 = re.compile(r"float8_e(4m3fn|5m2)(_rowwise|_blockwise)?")
"""Formats of layers; a scale's shape shows its granularity."""
_FORMAT_ENTRIES = {"format", "full_precision_matrix_mult", "group_size", "orig_dtype", "orig_shape"}
"""Allowed entries of a layer's format; others might change the meaning of its weights."""
MARKS = (
    "v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min",
    "__index_timestep_zero__",
)  # fmt: skip
"""Entries about the model's training, which affect the meaning of its answers."""

HEADER = "modelspec.prediction_type"
"""The header entry for the kind of a denoiser's answers: epsilon or v."""

WRAPPED = {"state_dict", "model"}
"""Entries of pickles that hold the weights, next to a training state."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.[^.]+)")
_ADAPTER = re.compile(
    r"\.lora_(A|B|up|down)\b|^lora_(unet|te)|\.(hada|lokr|oft)_\w+$|\.dora_scale$"
)
_OF_LIBRARIES = re.compile(r"(.+?)\.(?:weight\.)?(quant_state\.bitsandbytes__\w+|qweight)$")
"""Layers quantized by bitsandbytes, GPTQ or SVDQuant."""
UNREAD = (
    "weights of {0} are quantized as {1}, which is not read: take the model in "
    "bfloat16 or scaled float8, and let quantize do the rest"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a file of weights."""

    file: Path
    weights: dict[str, Tensor]
    marks: dict[str, Any] = field(default_factory=dict)  # about the model's training


def read_checkpoint(files: list[Path], dtype: torch.dtype) -> Checkpoint:
    """Read a checkpoint from its file, or from all of its shards.

    Args:
        dtype: dtype of unscaled weights; others keep the file's dtype.

    Raises:
        ValueError: it is an adapter, or quantized in an unsupported way.
    """
    weights: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        if is_gguf(file.name):
            weights |= read_gguf(file)
            continue
        if is_pth(file.name):
            weights |= read_pth(file)
            continue
        with safe_open(file, framework="pt") as opened:
            metadata |= opened.metadata() or {}
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    refuse_adapter(weights)
    weights = {plain: weights[name] for name, plain in plain_names(weights).items()}
    weights = as_wan(weights, dtype) if is_turbo_wan(weights) else weights
    marks = {mark: weights.pop(name) for name, mark in marks_in(weights).items()}
    if not weights:
        raise ValueError("it holds no weights")
    header = {HEADER: metadata[HEADER]} if HEADER in metadata else {}
    return Checkpoint(files[0], _unscaled(weights, metadata, dtype), {**marks, **header})


def read_gguf(file: Path) -> dict[str, Tensor]:
    """Map the tensors of a GGUF file into memory; diffusers' own function copies them."""
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter
    from gguf import GGUFReader

    weights: dict[str, Tensor] = {}
    for tensor in GGUFReader(file, "c").tensors:
        kind, value = tensor.tensor_type, torch.from_numpy(tensor.data)
        if kind.name == "BF16":  # diffusers would keep it as bytes, and fails at all but matrices
            value = value.view(torch.bfloat16)
        elif kind in SUPPORTED_GGUF_QUANT_TYPES:
            if len(tensor.shape) != 2:
                rule = "and quantized: diffusers computes with matrices only"
                raise ValueError(f"{tensor.name} has {len(tensor.shape)} axes, {rule}")
            value = GGUFParameter(value, quant_type=kind)
        elif kind.name not in ("F32", "F16"):
            raise ValueError(f"{tensor.name} is of type {kind.name}: diffusers does not support it")
        weights[tensor.name] = value
    return weights


def is_pth(name: str) -> bool:
    """Whether a file's name is that of a pickle of tensors."""
    return name.lower().endswith(".pth")


def read_pth(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a pickle that holds tensors only: objects that could run code are not unpickled.

    Args:
        device: `meta` reads names and shapes only.

    Raises:
        ValueError: it holds other objects, or cannot be read.
    """
    mapped = {"mmap": True} if zipfile.is_zipfile(file) and device != "meta" else {}
    try:
        content = torch.load(file, map_location=device, weights_only=True, **mapped)
    except (UnpicklingError, RuntimeError, OSError, EOFError, LookupError, TypeError) as error:
        raise ValueError(
            "it is no pickle of tensors alone, and others can run code: take a .safetensors"
        ) from error
    while isinstance(content, dict) and len(inner := WRAPPED & content.keys()) == 1:
        content = content[inner.pop()]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor) for name, weight in content.items()
    ):
        raise ValueError("it holds other things than tensors by name: take a .safetensors")
    return content


def shards_of(name: str) -> list[str]:
    """The names of all shards if a file is a shard; else its own name."""
    if (match := _SHARD.fullmatch(name)) is None:
        return [name]
    stem, _, number, suffix = match.groups()
    return [f"{stem}-{i:05}-of-{number}{suffix}" for i in range(1, int(number) + 1)]


def refuse_adapter(names: Iterable[str]) -> None:
    """Refuse an adapter's weights in place of a model's.

    Raises:
        ValueError: it is an adapter; the text explains how to use one.
    """
    if (name := next(filter(_ADAPTER.search, names), None)) is not None:
        raise ValueError(
            f"it is an adapter (it has {name}), and no model: serve the model that it was made "
            "for, with --lora NAME=FILE"
        )


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Plain names without prefixes added in training, by the file's names."""
    plain = {name: name.replace("_orig_mod.", "") for name in names}
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {old: new.removeprefix("module.") for old, new in plain.items()}
    return plain


def marks_in(names: Iterable[str]) -> dict[str, str]:
    """The marks among names, with any prefix."""
    return {
        name: mark for name in names for mark in MARKS if name == mark or name.endswith(f".{mark}")
    }


def _unscaled(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Multiply weights by their scales; drop the entries about scales."""
    _check_formats(weights, metadata)
    scales: dict[str, str] = {}
    notes = {name for name in weights if name.rpartition(".")[2] in ("scaled_fp8", "comfy_quant")}
    for name in weights:
        for suffix in (*SCALES, *INPUT_SCALES):
            weight = name.removesuffix(suffix) + ".weight"
            if name.endswith(suffix) and weight in weights:
                notes.add(name)
                if suffix in SCALES and scales.setdefault(weight, name) != name:
                    raise ValueError(f"{weight} has two scales: {scales[weight]} and {name}")
    plain = {name: weight for name, weight in weights.items() if name not in notes}
    for name, scale in scales.items():
        plain[name] = _times(name, plain[name], scale, weights[scale]).to(dtype)
    for name, value in plain.items():
        is_block = hasattr(value, "quant_type")
        if value.ndim > 1 and value.dtype in (torch.int8, torch.uint8) and not is_block:
            raise ValueError(UNREAD.format(name, "8-bit integers without their scales"))
    return plain


def _times(name: str, weight: Tensor, scale_name: str, scale: Tensor) -> Tensor:
    """Multiply a weight by its scale: per tensor, per output channel, or per block."""
    if not (weight.is_floating_point() or weight.dtype == torch.int8) or not (
        scale.is_floating_point() and scale.dtype.itemsize > 1
    ):
        raise ValueError(UNREAD.format(name, f"{weight.dtype} by {scale.dtype}"))
    wide, factor = weight.float(), scale.float()
    if not factor.isfinite().all():
        raise ValueError(f"{scale_name} is not finite, as scales must be")
    if factor.numel() == 1:
        return wide * factor.reshape(())
    if factor.shape == weight.shape[:1]:
        factor = factor.reshape(-1, *[1] * (weight.ndim - 1))
    if factor.ndim != weight.ndim or any(
        size % blocks for size, blocks in zip(weight.shape, factor.shape, strict=True)
    ):
        raise ValueError(
            f"{scale_name} is {tuple(scale.shape)}, its weight {tuple(weight.shape)}: a scale is "
            "one number, one for each output channel, or one for each block"
        )
    for axis, size in enumerate(weight.shape):
        factor = factor.repeat_interleave(size // factor.shape[axis], dim=axis)
    return wide * factor


def _check_formats(weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Refuse formats of quantized layers other than scaled float8, by name.

    ComfyUI stores a layer's format next to it, or those of all layers in the header.
    """
    formats: dict[str, Any] = {
        name.rpartition(".")[0]: _json(name, bytes(entry.flatten().to(torch.uint8).tolist()))
        for name, entry in weights.items()
        if name.endswith(".comfy_quant")
    }
    note = "_quantization_metadata"
    formats |= _json(note, metadata.get(note, "{}").encode()).get("layers") or {}
    formats |= {match[1]: match[2] for name in weights if (match := _OF_LIBRARIES.match(name))}
    for layer, entry in formats.items():
        kind: Any = entry.get("format") if isinstance(entry, dict) else entry
        extra = [n for n in entry if n not in _FORMAT_ENTRIES and entry[n]] if kind != entry else []
        if extra or not _FLOAT8.fullmatch(str(kind)):
            raise ValueError(UNREAD.format(layer, " with ".join(map(str, (kind, *extra)))))


def _json(name: str, data: bytes) -> dict[str, Any]:
    """Parse a JSON entry about formats.

    Raises:
        ValueError: the entry cannot be read; the text names it.
    """
    try:
        entry = jsonfile.loads(data.decode())
    except ValueError as error:
        raise ValueError(f"its {name} cannot be read: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"its {name} must be an object: {entry!r:.60}")
    return entry
