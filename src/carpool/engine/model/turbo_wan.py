"""TurboWan: its checkpoints under Wan's original names, and its sampler.

Its files hold Wan's denoiser alone; the rest comes from the Wan pipeline that it was made of.
Linear layers may be int8, with a scale for each 128 x 128 weights: they are read as plain weights.

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
"""Of the second, third and fourth step: the arc tangent of noise by signal."""
SIGMA_MAX, SIGMA_MAX_OF_PICTURES = 80.0, 200.0
"""Noise by signal at the first step, of text-to-video and of image-to-video."""
BASES = {
    (1536, 16): "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    (5120, 16): "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    (5120, 36): "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
}
"""Pipelines that have the rest, by width and channels of the denoiser."""
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
        The class and components that were given, where no denoiser is TurboWan's.
    """
    turbo = [part for part in parts.values() if isinstance(part, SparseLinearWanTransformer)]
    if not turbo:
        return cls, dict(parts)
    from carpool.engine.model.turbo_pipelines import PIPELINES  # imports Wan's, for Wan alone

    if cls not in PIPELINES:
        return cls, dict(parts)
    sees_picture = turbo[0].config.in_channels != turbo[0].config.out_channels
    sigma_max = SIGMA_MAX_OF_PICTURES if sees_picture else SIGMA_MAX
    scheduler = DMDScheduler(levels(sigma_max), rounds_timesteps=True)
    return PIPELINES[cls], {**parts, "scheduler": scheduler}


def base_of(weights: Mapping[str, Tensor]) -> str | None:
    """The hub id of the pipeline that a TurboWan denoiser is of; None for other weights.

    Args:
        weights: by Wan's names, as `as_wan` gives them.
    """
    if not any(".proj_l." in name for name in weights):
        return None
    shapes = (weights[name].shape for name in weights if name.endswith("patch_embedding.weight"))
    return BASES.get(next(((shape[0], shape[1]) for shape in shapes), (0, 0)))


def is_turbo_wan(names: Mapping[str, Any]) -> bool:
    """Whether a file's weights are named as TurboDiffusion names them."""
    return any(_PROJECTION in name for name in names)


def as_wan(weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights of a TurboWan file as a file of Wan would have them, the projections beside.

    Args:
        dtype: of weights that were int8.

    Raises:
        ValueError: an int8 layer has no scale, or one of another shape.
    """
    plain = {}
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == "scale" and f"{layer}.int8_weight" in weights:
            continue
        if kind == "int8_weight":
            scale = weights.get(f"{layer}.scale")
            name, weight = f"{layer}.weight", _unscaled(layer, weight, scale).to(dtype)
        if (
            name.endswith("patch_embedding.weight") and weight.ndim == 2
        ):  # a layer over flat patches
            weight = torch.unflatten(weight, 1, (-1, *PATCH))
        plain[name.replace(_PROJECTION, ".proj_l.")] = weight
    return plain


def _unscaled(layer: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    """An int8 weight (out, in) times its scales (blocks, blocks); blocks at the ends are short."""
    blocks = tuple(-(-size // INT8_BLOCK) for size in weight.shape)
    if scale is None or tuple(scale.shape) != blocks or not scale.is_floating_point():
        shape = None if scale is None else tuple(scale.shape)
        raise ValueError(f"{layer}.scale is {shape}, and must be {blocks} floating-point numbers")
    for axis in (0, 1):
        scale = scale.repeat_interleave(INT8_BLOCK, dim=axis).narrow(axis, 0, weight.shape[axis])
    return weight.float() * scale.float()
