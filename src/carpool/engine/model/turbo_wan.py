"""TurboWan: its checkpoints under Wan's original names, and its sampler.

Its files hold only Wan's denoiser; the rest comes from the original Wan pipeline. Linear layers may
be int8, with a scale for each 128 x 128 weights: they are read as plain weights.

Source: Zhang et al., "TurboDiffusion: Accelerating Video Diffusion Models by 100-200 Times" (2025).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.sparse_wan import SparseLinearWanTransformer

ANGLES = (1.5, 1.4, 1.0)
"""Arc tangent of noise over signal, at the second, third and fourth step."""
SIGMA_MAX, SIGMA_MAX_OF_PICTURES = 80.0, 200.0
"""Noise over signal at the first step, for text-to-video and for image-to-video."""
BASES = {
    (1536, 16): "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    (5120, 16): "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    (5120, 36): "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
}
"""The original pipelines, by width and channels of the denoiser."""
INT8_BLOCK = 128
PATCH = (1, 2, 2)

_PROJECTION = ".attn_op.local_attn.proj_l."


def levels(sigma_max: float) -> tuple[float, ...]:
    """The timesteps of the four steps, 0-1000; fewer steps take the first ones."""
    angles = (math.atan(sigma_max), *ANGLES)
    return tuple(1000 * math.sin(x) / (math.cos(x) + math.sin(x)) for x in angles)


def with_sampler(cls: Any, parts: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The pipeline class and the scheduler for these components.

    Returns:
        The given class and components, if no denoiser is TurboWan's.
    """
    turbo = [part for part in parts.values() if isinstance(part, SparseLinearWanTransformer)]
    if not turbo:
        return cls, dict(parts)
    from carpool.engine.model.turbo_pipelines import PIPELINES  # imports Wan's pipelines

    if cls not in PIPELINES:
        return cls, dict(parts)
    sees_picture = turbo[0].config.in_channels != turbo[0].config.out_channels
    sigma_max = SIGMA_MAX_OF_PICTURES if sees_picture else SIGMA_MAX
    scheduler = DMDScheduler(levels(sigma_max), rounds_timesteps=True)
    return PIPELINES[cls], {**parts, "scheduler": scheduler}


def base_of(weights: Mapping[str, Tensor]) -> str | None:
    """The hub id of a TurboWan denoiser's original pipeline; None for other weights.

    Args:
        weights: weights by Wan's names, from `as_wan`.
    """
    if not any(".proj_l." in name for name in weights):
        return None
    shapes = (weights[name].shape for name in weights if name.endswith("patch_embedding.weight"))
    return BASES.get(next(((shape[0], shape[1]) for shape in shapes), (0, 0)))


def is_turbo_wan(names: Mapping[str, Any]) -> bool:
    """Whether a file's weights have TurboDiffusion's names."""
    return any(_PROJECTION in name for name in names)


def as_wan(weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Convert a TurboWan file's weights to Wan's names, plus the projections.

    Args:
        dtype: dtype for former int8 weights.

    Raises:
        ValueError: an int8 layer has no scale, or a scale of another shape.
    """
    plain = {}
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == "scale" and f"{layer}.int8_weight" in weights:
            continue
        if kind == "int8_weight":
            scale = weights.get(f"{layer}.scale")
            name, weight = f"{layer}.weight", _unscaled(layer, weight, scale).to(dtype)
        if name.endswith("patch_embedding.weight") and weight.ndim == 2:  # stored for flat patches
            weight = torch.unflatten(weight, 1, (-1, *PATCH))
        plain[name.replace(_PROJECTION, ".proj_l.")] = weight
    return plain


def _unscaled(layer: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply an int8 weight (out, in) by its scales (blocks, blocks); end blocks may be short."""
    blocks = tuple(-(-size // INT8_BLOCK) for size in weight.shape)
    if scale is None or tuple(scale.shape) != blocks or not scale.is_floating_point():
        shape = None if scale is None else tuple(scale.shape)
        raise ValueError(f"{layer}.scale is {shape}, and must be {blocks} floating-point numbers")
    for axis in (0, 1):
        scale = scale.repeat_interleave(INT8_BLOCK, dim=axis).narrow(axis, 0, weight.shape[axis])
    return weight.float() * scale.float()
