"""Fit a linear map from a model's latents to colours.

Source: the linear map, "Decoding latents to RGB without upscaling", Hugging Face forum, 2022,
discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204. The fit is ours.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

CELLS = 16  # latent positions per side of the fitted images
MOST_SCALE = 64  # max pixels per side of a latent position


def colours(vae: Any) -> tuple[Tensor, int]:
    """Fit the map to an autoencoder.

    Returns:
        The map, (channels + 1, 3), whose last row is added; and the pixels per side of one latent
        position.

    Raises:
        AttributeError, TypeError, RuntimeError: it cannot encode images, or has another interface.
    """
    weight = next(vae.parameters())
    probe_px = 2 * MOST_SCALE
    scale = probe_px // _encoded(vae, torch.zeros(1, 3, probe_px, probe_px).to(weight)).shape[-1]
    pictures = _patterns(CELLS * scale)
    latents = _encoded(vae, pictures.to(weight)).float().cpu()
    samples = latents.movedim(1, -1).flatten(0, 2)
    samples = torch.cat([samples, torch.ones(len(samples), 1)], dim=1)
    colours = (avg_pool2d(pictures, scale) + 1) / 2
    answer = torch.linalg.lstsq(samples, colours.movedim(1, -1).flatten(0, 2), driver="gelsd")
    factors: Tensor = answer.solution
    return factors, scale


def _encoded(vae: Any, pictures: Tensor) -> Tensor:
    """Encode images to latents (images, channels, rows, columns), without noise."""
    is_of_videos = any(weight.ndim == 5 for weight in vae.parameters())
    answer = vae.encode(pictures.unsqueeze(2) if is_of_videos else pictures)
    latents = answer.latent_dist.mode() if hasattr(answer, "latent_dist") else answer.latent
    images: Tensor = latents[:, :, 0] if is_of_videos else latents
    return images


def _patterns(side_px: int) -> Tensor:
    """Images (4, 3, side, side), -1 to 1, of nine large flat squares each, with hard edges."""
    small = torch.rand(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return interpolate(small, size=(side_px, side_px), mode="nearest")
