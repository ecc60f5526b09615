"""Write a pipeline of published size with random weights, in the hub's folder layout.

Configurations come from the planner, tokenizers from the embedded models. Weights are bfloat16,
scaled so that activations stay near 1, and written in parts: only a part of a tensor is in memory.
The two experts of Wan 2.2 are the same files under two names, to save disk space.
"""

import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from diffusers import ModelMixin
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from carpool.models.embedded import MODEL_DIR, VIDEO_MODEL_DIR
from carpool_lab.plan.names import known
from carpool_lab.plan.shapes import part

DTYPE = torch.bfloat16
POOL = 1 << 24  # pool of random numbers; each weight uses its own offset
SHARD_BYTES = {"diffusers": 9.98e9, "transformers": 4.99e9}  # shard sizes of the libraries
BASES = {"flux": ("FLUX.1-dev", MODEL_DIR), "wan": ("Wan2.2-T2V-A14B", VIDEO_MODEL_DIR)}
SCHNELL = {"guidance_embeds": False}  # its transformer's differences to FLUX.1-dev's
RANK = 16
Q8_ROW = 32  # values in a block of Q8_0
TINY: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4,
        "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "joint_attention_dim": 128,
    },
    "WanTransformer3DModel": {
        "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 256,
        "text_dim": 128,
    },
    "T5EncoderModel": {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 2},
    "UMT5EncoderModel": {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 2},
}  # fmt: skip


def write(name: str, folder: Path, *, is_tiny: bool = False) -> dict[str, int]:
    """Write a pipeline; returns the bytes of its weights by component.

    Args:
        name: `flux` (FLUX.1-schnell) or `wan` (Wan 2.2 T2V A14B).
        is_tiny: few small blocks, for a dry run.
    """
    planned, base = BASES[name]
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "carpool.json"))
    index = json.loads((folder / "model_index.json").read_text())
    sizes: dict[str, int] = {}
    for component, (library, *config) in known()[planned]["components"].items():
        place = folder / component
        if library == "tokenizer":
            _edit(place / "tokenizer_config.json", model_max_length=config[0])
        elif library == "value":
            index[component] = config[0]
        elif component == "scheduler":
            values = {"shift": 1.0, "use_dynamic_shifting": False} if name == "flux" else config[1]
            _edit(place / "scheduler_config.json", **values)
        elif component == "transformer_2":
            index[component] = index["transformer"]
            shutil.copytree(folder / "transformer", place, copy_function=os.link)
            sizes[component] = sizes["transformer"]
        else:
            small = TINY.get(config[0], {}) if is_tiny else {}
            values = SCHNELL if name == "flux" and component == "transformer" else {}
            module = part([config[0], {**config[1], **values, **small}], DTYPE)
            sizes[component] = _write_module(module, library, place)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return sizes


def _edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}, indent=2))


def _write_module(module: Any, library: str, folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    if isinstance(module, ModelMixin):
        module.save_config(folder)
    else:
        module.config.architectures, module.config.dtype = [type(module).__name__], DTYPE
        module.config.save_pretrained(folder)
    stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
    shards = list(_shards(_weights(module), SHARD_BYTES[library]))
    by_name: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = folder / f"{stem}{suffix}.safetensors"
        total += _write_shard(file, shard)
        by_name |= dict.fromkeys(shard, file.name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return total


def _weights(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes by name; shared weights appear once."""
    visited: set[int] = set()
    shapes = {}
    for name, weight in module.state_dict(keep_vars=True).items():
        if id(weight) not in visited:
            visited.add(id(weight))
            shapes[name] = weight.shape
    return shapes


def _shards(shapes: Mapping[str, torch.Size], limit: float) -> Iterator[dict[str, torch.Size]]:
    shard: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        if shard and _bytes(shard) + 2 * math.prod(shape) > limit:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _bytes(shard: Mapping[str, torch.Size]) -> int:
    return sum(DTYPE.itemsize * math.prod(shape) for shape in shard.values())


def _write_shard(file: Path, shard: Mapping[str, torch.Size]) -> int:
    """Write one safetensors file, tensor by tensor."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard.items():
        begin, end = end, end + DTYPE.itemsize * math.prod(shape)
        head[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shard.items():
            for values in _drawn(name, shape):
                out.write(values.view(torch.uint8).numpy().data)
    return end


def _drawn(name: str, shape: torch.Size) -> Iterator[Tensor]:
    """Yield parts of a weight's values: matrices scaled by inputs, scales 1, biases 0."""
    count = math.prod(shape)
    if len(shape) < 2:
        yield torch.full((count,), float(not name.endswith("bias")), dtype=DTYPE)
        return
    std, at = math.prod(shape[1:]) ** -0.5, zlib.crc32(name.encode()) % POOL
    while count:
        values = _pool()[at : at + count] * std
        yield values
        count, at = count - len(values), 0


def _pool() -> Tensor:
    if not _POOL:
        _POOL.append(torch.randn(POOL, generator=torch.Generator().manual_seed(0)).to(DTYPE))
    return _POOL[0]


_POOL: list[Tensor] = []


def write_lora(folder: Path, component: str, file: Path) -> None:
    """Write an adapter of typical rank for the attention of a denoiser's blocks."""
    chance, weights = torch.Generator().manual_seed(1), {}
    for name, shape in _read_shapes(folder / component).items():
        if name.endswith(("attn.to_q.weight", "attn.to_k.weight", "attn1.to_q.weight")):
            layer = f"transformer.{name.removesuffix('.weight')}"
            for half, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
                values = torch.randn(size, generator=chance) * size[1] ** -0.5
                weights[f"{layer}.lora_{half}.weight"] = values.to(DTYPE)
    save_file(weights, file)


def _read_shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            shapes |= {name: opened.get_slice(name).get_shape() for name in names}
    return shapes


def write_gguf(folder: Path, file: Path) -> int:
    """Write a denoiser as GGUF, its matrices as Q8_0; returns the bytes of its weights."""
    writer, total = gguf.GGUFWriter(file, "flux"), 0
    kinds = gguf.GGMLQuantizationType
    shapes = _read_shapes(folder)
    packed = {n: len(s) == 2 and s[1] % Q8_ROW == 0 for n, s in shapes.items()}
    for name, shape in shapes.items():
        size = math.prod(shape) // Q8_ROW * (Q8_ROW + 2) if packed[name] else 4 * math.prod(shape)
        kind, rows = (kinds.Q8_0, [shape[0], size // shape[0]]) if packed[name] else (None, shape)
        dtype: Any = torch.zeros(0, dtype=torch.uint8 if kind else torch.float32).numpy().dtype
        writer.add_tensor_info(name, rows, dtype, size, raw_dtype=kind)
        total += size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as opened:
            for name in [name for name in shapes if name in set(opened.keys())]:
                value = opened.get_tensor(name)
                writer.write_tensor_data((_q8(value) if packed[name] else value.float()).numpy())
    writer.close()
    return total


def _q8(value: Tensor) -> Tensor:
    """Blocks of Q8_0: a scale in float16, and 32 numbers of 8 bits."""
    blocks = value.float().reshape(-1, Q8_ROW)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    numbers = (blocks / scale.clamp(min=1e-12)).round().to(torch.int8)
    parts = scale.to(torch.float16).view(torch.uint8), numbers.view(torch.uint8)
    return torch.cat(parts, dim=1).reshape(value.shape[0], -1)
