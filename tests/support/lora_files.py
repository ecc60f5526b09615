"""LoRA files for tests: random weights for chosen layers of a family's modules."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.engine_driver import served

ATTENTION = r".*\.(to_[qkv]|to_out\.0)"
LAYERS = {  # by family, of each component
    "flux": {"transformer": rf"{ATTENTION}|.*(proj_mlp|net\.2|norm\.linear)"},
    "sdxl": {
        "unet": rf"{ATTENTION}|.*(conv1|time_emb_proj)",
        "text_encoder": r".*(q_proj|fc1)",
        "text_encoder_2": r".*(v_proj|fc2)",
    },
    "zimage": {"transformer": r"layers\..*\.(to_[qkv]|to_out\.0)"},
    "wan21_t2v": {"transformer": r"blocks\..*\.(to_[qkv]|to_out\.0)"},
    "wan22_t2v_a14b": {"transformer": r"blocks\..*\.(to_[qkv]|to_out\.0)"},
}
RANK = 4


def weights(family: str, seed: int, *, std: float = 0.3) -> dict[str, Tensor]:
    """PEFT's names, as `save_lora_weights` of diffusers writes them."""
    chance = torch.Generator().manual_seed(seed)
    made = {}
    for component, pattern in LAYERS[family].items():
        for path, layer in getattr(served(family), component).named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)) and re.fullmatch(pattern, path):
                down = (RANK, *layer.weight.shape[1:])
                up = (layer.weight.shape[0], RANK, *(1 for _ in layer.weight.shape[2:]))
                for name, shape in (("lora_A", down), ("lora_B", up)):
                    drawn = torch.randn(shape, generator=chance) * std
                    made[f"{component}.{path}.{name}.weight"] = drawn
    return made


def dora(state: dict[str, Tensor], family: str, component: str) -> dict[str, Tensor]:
    """The same for one component, with magnitudes that are not those of the weights: a DoRA."""
    chance, made = torch.Generator().manual_seed(7), dict[str, Tensor]()
    for name, weight in state.items():
        if not name.startswith(f"{component}."):
            continue
        made[name] = weight
        layer_path = name.removeprefix(f"{component}.").removesuffix(".lora_B.weight")
        if name.endswith(".lora_B.weight"):
            own = getattr(served(family), component).get_submodule(layer_path).weight.detach()
            lengths = own.flatten(1).norm(dim=1)
            lengths = lengths * (1 + 0.3 * torch.rand(len(lengths), generator=chance))
            shape = (-1,) if own.ndim == 2 else (1, -1, 1, 1)
            made[f"{component}.{layer_path}.lora_magnitude_vector"] = lengths.view(shape)
    return made


def lokr(state: dict[str, Tensor], family: str, factor: int = 4) -> dict[str, Tensor]:
    """A LoKr of the same layers of a transformer, in the names of ai-toolkit."""
    chance, made = torch.Generator().manual_seed(8), dict[str, Tensor]()
    for name in state:
        if name.endswith(".lora_B.weight"):
            path = name.removeprefix("transformer.").removesuffix(".lora_B.weight")
            gives, takes = served(family).transformer.get_submodule(path).weight.shape
            shapes = {"w1": (factor, factor), "w2": (gives // factor, takes // factor)}
            for factor_name, shape in shapes.items():
                drawn = torch.randn(shape, generator=chance) * 0.3
                made[f"diffusion_model.{path}.lokr_{factor_name}"] = drawn
            made[f"diffusion_model.{path}.alpha"] = torch.tensor(1.0)
    return made


def comfy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Wan adapter in the names of ComfyUI."""
    names = {".attn1.": ".self_attn.", ".attn2.": ".cross_attn.", ".to_out.0.": ".o."}
    names |= {f".to_{one}.": f".{one}." for one in "qkv"}
    made = {}
    for name, weight in state.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        made[name.replace("transformer.", "diffusion_model.", 1)] = weight
    return made


def kohya(state: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The same in kohya's names, with the alpha of each layer: its scaling is alpha / rank."""
    made = {}
    for name, weight in state.items():
        component, _, rest = name.partition(".")
        path, kind, _ = rest.rsplit(".", 2)
        prefix = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
        stem = f"{prefix[component]}_{path.replace('.', '_')}"
        if component == "text_encoder" and "text_model" not in stem:
            stem = stem.replace("lora_te1_", "lora_te1_text_model_")
        made[f"{stem}.lora_{'down' if kind == 'lora_A' else 'up'}.weight"] = weight
        made[f"{stem}.alpha"] = torch.tensor(alpha)
    return made


def write(file: Path, state: dict[str, Tensor], **metadata: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file, metadata={"format": "pt", **metadata})
    return file


def adapter(folder: Path, family: str, seed: int) -> Path:
    """An adapter of a family as a file; another seed, another adapter."""
    return write(folder / f"{family}-{seed}.safetensors", weights(family, seed))
