"""The autoencoder of the embedded model: 64x64 pixels to 8x8 latents of 8 channels."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor

from training.shapes.draw import SIZE_PX, draw, sample
from training.shapes.fit import AdamW, Log, Loss, fit

CHANNELS = 8
KL_WEIGHT = 5e-6


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """Convert pictures to bytes, (pictures, 3, height, width)."""
    stacked = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def build_vae() -> AutoencoderKL:
    """Make an untrained autoencoder with a scale factor of 8."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=8,
        sample_size=SIZE_PX,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def train_vae(
    steps: int, seed: int, log: Log, rows: int = 8, peak: float = 1.5e-3
) -> AutoencoderKL:
    """Train the autoencoder on drawn scenes, measure its latents and freeze it."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vae = build_vae().to(memory_format=torch.channels_last)
    optimizer = AdamW(vae.parameters(), peak, (steps, 0.04), betas=(0.9, 0.99))

    def batch_loss(step: int) -> Loss:
        batch = pixels([draw(sample(rng)[0], rng) for _ in range(rows)])
        real = (batch.float() / 127.5 - 1).to(memory_format=torch.channels_last)
        posterior = vae.encode(real).latent_dist
        error = vae.decode(posterior.sample()).sample - real
        loss = error.abs().mean() + error.square().mean() + KL_WEIGHT * posterior.kl().mean()
        return loss, lambda: describe(error, posterior)

    fit("vae", steps, batch_loss, optimizer, log)
    vae = vae.eval().requires_grad_(False)
    with torch.no_grad():
        samples = pixels([draw(sample(rng)[0], rng) for _ in range(512)])
        batches = torch.tensor_split(samples.float() / 127.5 - 1, 8)
        means = torch.cat([vae.encode(batch).latent_dist.mean for batch in batches])
    vae.register_to_config(
        scaling_factor=round(1 / means.std().item(), 4), shift_factor=round(means.mean().item(), 4)
    )
    log(f"vae scaling {vae.config.scaling_factor} shift {vae.config.shift_factor}")
    return vae


def describe(error: Tensor, posterior: DiagonalGaussianDistribution) -> str:
    """Describe a batch's error and the noise of its latents."""
    noise = posterior.std.mean() / posterior.mean.std()
    return (
        f"L1 {error.abs().mean().item():.4f}"
        f" posterior noise {noise.item():.3f} of the latents' spread"
    )
