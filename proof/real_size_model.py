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
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from diffusers import ModelMixin
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from carpool.models.embedded import MODEL_DIR, VIDEO_MODEL_DIR
from carpool_lab.plan.names import known
from carpool_lab.plan.shapes import part

DTYPE = torch.bfloat16
POOL = 1 << 24  # pool of random numbers; each weight uses its own offset
STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
SHARDS = {"diffusers": "10GB", "transformers": "5GB"}  # shard sizes of the libraries
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


def write(name: str, folder: Path, *, without: str = "", is_tiny: bool = False) -> None:
    """Write a pipeline with random weights.

    Args:
        name: `flux` (FLUX.1-schnell) or `wan` (Wan 2.2 T2V A14B).
        without: a component of which only the configuration is written.
        is_tiny: few small blocks, for a dry run.
    """
    planned, base = BASES[name]
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "carpool.json"))
    index = json.loads((folder / "model_index.json").read_text())
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
        else:
            small = TINY.get(config[0], {}) if is_tiny else {}
            values = SCHNELL if name == "flux" and component == "transformer" else {}
            module = part([config[0], {**config[1], **values, **small}], DTYPE)
            if component == without:
                module.save_config(place)
            else:
                _write_module(module, library, place)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def _edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}, indent=2))


def _write_module(module: Any, library: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if isinstance(module, ModelMixin):
        module.save_config(folder)
    else:
        module.config.architectures, module.config.dtype = [type(module).__name__], DTYPE
        module.config.save_pretrained(folder)
    stem, weights = STEMS[library], _weights(module)
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=SHARDS[library]
    )
    for file, names in split.filename_to_tensors.items():
        _write_shard(folder / file, {name: weights[name].shape for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Weights on the meta device by name; shared weights appear once."""
    weights = module.state_dict(keep_vars=True)
    names = {id(weight): name for name, weight in reversed(weights.items())}
    return {name: weight for name, weight in weights.items() if names[id(weight)] == name}


def _write_shard(file: Path, shard: Mapping[str, torch.Size]) -> None:
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


@cache
def _pool() -> Tensor:
    return torch.randn(POOL, generator=torch.Generator().manual_seed(0)).to(DTYPE)


def write_lora(folder: Path, component: str, file: Path) -> None:
    """Write an adapter of typical rank for the attention of a denoiser's blocks."""
    chance, weights = torch.Generator().manual_seed(1), {}
    for name, shape in _shapes(folder / component).items():
        if name.endswith(("attn.to_q.weight", "attn.to_k.weight", "attn1.to_q.weight")):
            layer = f"transformer.{name.removesuffix('.weight')}"
            for half, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
                values = torch.randn(size, generator=chance) * size[1] ** -0.5
                weights[f"{layer}.lora_{half}.weight"] = values.to(DTYPE)
    save_file(weights, file)


def _shapes(folder: Path) -> dict[str, torch.Size]:
    config = json.loads((folder / "config.json").read_text())
    values = {name: value for name, value in config.items() if not name.startswith("_")}
    weights = _weights(part([config["_class_name"], values], DTYPE))
    return {name: weight.shape for name, weight in weights.items()}


def write_gguf(architecture: str, folder: Path, file: Path) -> None:
    """Write a random denoiser of a folder's configuration as GGUF, its matrices as Q8_0."""
    shapes, kind = _shapes(folder), gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(file, architecture)
    widths = {  # bytes of a row of blocks
        n: shape[1] // Q8_ROW * (Q8_ROW + 2)
        for n, shape in shapes.items() if len(shape) == 2 and shape[1] % Q8_ROW == 0
    }  # fmt: skip
    for name, shape in shapes.items():
        if width := widths.get(name):
            size = shape[0] * width
            writer.add_tensor_info(name, (shape[0], width), np.dtype(np.uint8), size, kind)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        if width := widths.get(name):
            blocks = _q8_pool(shape[1] ** -0.5)
            blocks = np.roll(blocks, zlib.crc32(name.encode()) % len(blocks), axis=0)
            writer.write_tensor_data(np.resize(blocks, (shape[0], width)))
        else:
            writer.write_tensor_data(torch.cat(list(_drawn(name, shape))).float().numpy())
    writer.close()


@cache
def _q8_pool(std: float) -> Any:
    """Random blocks of Q8_0: a scale in float16, and 32 numbers of 8 bits."""
    values = (_pool().float() * std).reshape(-1, Q8_ROW)
    scale = values.abs().amax(1, keepdim=True) / 127
    numbers = (values / scale).round().to(torch.int8)
    parts = scale.to(torch.float16).view(torch.uint8), numbers.view(torch.uint8)
    return torch.cat(parts, dim=1).numpy()
