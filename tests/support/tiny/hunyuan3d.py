"""Hunyuan3D-2 in its published layout and naming, one tiny configuration for each published size.

Their weights are drawn; `hy3dgen` builds the modules, so it has to be installed.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from support.tiny.parts import drawn

IS_THERE = find_spec("hy3dgen") is not None
PACKAGE = "hy3dgen.shapegen"
DINO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "mlp_ratio": 2}  # fmt: skip
ENCODER = {"type": "DinoImageEncoder", "kwargs": {"config": DINO, "image_size": 28}}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("models.Hunyuan3DDiT", {
        "in_channels": 8, "context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 4.0,
        "num_heads": 2, "depth": 2, "depth_single_blocks": 4, "axes_dim": [16], "theta": 10000,
        "qkv_bias": True,
    }),
    "vae": ("models.ShapeVAE", {
        "num_latents": 12, "embed_dim": 8, "num_freqs": 8, "include_pi": False, "heads": 2,
        "width": 32, "num_decoder_layers": 2, "qkv_bias": False, "qk_norm": True,
        "scale_factor": 0.9990943042622529,
    }),
    "conditioner": ("models.SingleImageEncoder", {"main_image_encoder": ENCODER}),
    "scheduler": ("schedulers.FlowMatchEulerDiscreteScheduler", {"num_train_timesteps": 1000}),
    "image_processor": ("preprocessors.ImageProcessorV2", {"size": 28}),
}  # fmt: skip
TURBO = "schedulers.ConsistencyFlowMatchEulerDiscreteScheduler"
SIZES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {  # what differs from 2.0, 1.1 billion
    "hunyuan3d-dit-v2-0": {},
    "hunyuan3d-dit-v2-0-turbo": {
        "model": ("models.Hunyuan3DDiT", PARTS["model"][1] | {"guidance_embed": True}),
        "scheduler": (TURBO, {"num_train_timesteps": 1000, "pcm_timesteps": 100}),
    },
    "hunyuan3d-dit-v2-mini": {  # 0.6 billion: half of the blocks, a sixth of the latents
        "model": ("models.Hunyuan3DDiT", PARTS["model"][1] | {
            "depth": 1, "depth_single_blocks": 2,
        }),
        "vae": ("models.ShapeVAE", PARTS["vae"][1] | {
            "num_latents": 6, "geo_decoder_mlp_expand_ratio": 4, "geo_decoder_downsample_ratio": 1,
            "geo_decoder_ln_post": True, "scale_factor": 1.0188137142395404,
        }),
    },
}  # fmt: skip


def config(size: str = "hunyuan3d-dit-v2-0", **targets: str) -> dict[str, Any]:
    """The content of `config.yaml`.

    Args:
        targets: other classes of parts.
    """
    return {
        name: {"target": targets.get(name, f"{PACKAGE}.{cls}"), "params": params}
        for name, (cls, params) in (PARTS | SIZES[size]).items()
    }


def write(root: Path, size: str = "hunyuan3d-dit-v2-0") -> Path:
    """Write a folder of the repository; returns it."""
    place = root / size
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(yaml.safe_dump(config(size)))
    weights: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in ("model", "vae", "conditioner"):
            entry = config(size)[name]
            module, _, cls = entry["target"].rpartition(".")
            part = drawn(getattr(import_module(module), cls)(**entry["params"]))
            weights |= {f"{name}.{k}": w.contiguous() for k, w in part.state_dict().items()}
    save_file(weights, place / "model.fp16.safetensors")
    return place
