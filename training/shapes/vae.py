"""The autoencoder of the embedded model: 64x64 pixels to 8x8 latents of 8 channels."""

import random

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from training.shapes.draw import SIZE_PX, draw, sample
from training.shapes.text import Log

CHANNELS = 8
KL_WEIGHT = 5e-6


def pixels(images: list[Image.Image]) -> Tensor:
    """Turn pictures into bytes, (pictures, 3, SIZE_PX, SIZE_PX)."""
    stacked = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def build_vae() -> AutoencoderKL:
    """Make an untrained autoencoder with a factor of 8."""
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
    optimizer = torch.optim.AdamW(vae.parameters(), peak, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, pct_start=0.04)
    for step in range(1, steps + 1):
        drawn = pixels([draw(sample(rng)[0], rng) for _ in range(rows)])
        real = (drawn.float() / 127.5 - 1).to(memory_format=torch.channels_last)
        posterior = vae.encode(real).latent_dist
        redrawn = vae.decode(posterior.sample()).sample
        error = redrawn - real
        loss = error.abs().mean() + error.square().mean() + KL_WEIGHT * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            noise = posterior.std.mean() / posterior.mean.std()
            log(
                f"vae step {step} loss {loss.item():.4f} L1 {error.abs().mean().item():.4f}"
                f" posterior noise {noise.item():.3f} of the latents' spread"
            )
    vae = vae.eval().requires_grad_(False)
    with torch.no_grad():
        drawn = pixels([draw(sample(rng)[0], rng) for _ in range(512)])
        batches = torch.tensor_split(drawn.float() / 127.5 - 1, 8)
        means = torch.cat([vae.encode(batch).latent_dist.mean for batch in batches])
    vae.register_to_config(
        scaling_factor=round(1 / means.std().item(), 4), shift_factor=round(means.mean().item(), 4)
    )
    log(f"vae scaling {vae.config.scaling_factor} shift {vae.config.shift_factor}")
    return vae
