"""The autoencoder of the video model: 9 frames of 48x48 pixels to 3x6x6 latents of 16 channels.

As in Wan, the first frame has latents of its own and each four that follow share theirs. Pixels
are folded two by two before the first layer, as in Wan 2.2, which makes it four times as fast.
"""

import random

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from torch import Tensor, nn

from carpool.shapes.text import Log
from carpool.shapes.video.draw import draw, sample

CHANNELS = 16
KL_WEIGHT = 2e-3  # of the mean over all latents


def pixels(videos: list[list[Image.Image]]) -> Tensor:
    """Turn videos into values of -1 to 1, (videos, 3, FRAMES, SIZE_PX, SIZE_PX)."""
    stacked = np.stack([[np.asarray(frame) for frame in frames] for frames in videos])
    return torch.from_numpy(stacked).permute(0, 4, 1, 2, 3).contiguous().float() / 127.5 - 1


def build_vae() -> AutoencoderKLWan:
    """Make an untrained autoencoder with factors of 4 in time and 8 in height and width."""
    return AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=24,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    )


def train_vae(
    steps: int, seed: int, log: Log, rows: int = 4, peak: float = 1.5e-3
) -> AutoencoderKLWan:
    """Train the autoencoder on drawn clips, measure its latents and freeze it."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vae = build_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), peak, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, pct_start=0.04)
    for step in range(1, steps + 1):
        real = pixels([draw(sample(rng)[0], rng) for _ in range(rows)])
        posterior = vae.encode(real).latent_dist
        error = vae.decode(posterior.sample()).sample - real
        kl = (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean() / 2
        loss = error.abs().mean() + error.square().mean() + KL_WEIGHT * kl
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
        posteriors = [
            vae.encode(pixels([draw(sample(rng)[0], rng) for _ in range(16)])).latent_dist
            for _ in range(16)
        ]
    latents = torch.cat([posterior.sample() for posterior in posteriors])
    vae.register_to_config(
        latents_mean=[round(value, 4) for value in latents.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(value, 4) for value in latents.std((0, 2, 3, 4)).tolist()],
    )
    log(f"vae latents: mean {vae.config.latents_mean}, spread {vae.config.latents_std}")
    return vae


def encode(vae: AutoencoderKLWan, videos: list[list[Image.Image]]) -> Tensor:
    """Encode videos as the pipeline's latents, (videos, CHANNELS, 3, 6, 6), of unit spread."""
    with torch.no_grad():
        mean: Tensor = vae.encode(pixels(videos)).latent_dist.mean
    shape = (1, CHANNELS, 1, 1, 1)
    middle = torch.tensor(vae.config.latents_mean).view(shape)
    return (mean - middle) / torch.tensor(vae.config.latents_std).view(shape)
