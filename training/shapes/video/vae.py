"""The autoencoder of the video model: 9 frames of 48x48 pixels to 3x6x6 latents of 16 channels.

As in Wan, the first frame has its own latents, and each four later frames share latents. As in
Wan 2.2, 2x2 pixels are folded before the first layer, which makes it four times as fast.

Training starts with single frames, at a quarter of the cost, and with almost no noise on the
latents: with noise of the latents' size it ignored them for the first 800 steps.
"""

import random
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from torch import Tensor, nn

from training.shapes import vae as pictures
from training.shapes.fit import Log, Loss, fit
from training.shapes.video.draw import draw, sample
from training.shapes.video.muon import Muon

CHANNELS = 16
KL_WEIGHT = 1e-3  # final weight of the mean over all latents
FIRST_LOG_VARIANCE = -6.0
SHAPE_WEIGHT = 5.0  # weight of pixels in or next to the shape; background: 1


def pixels(videos: Sequence[list[Image.Image]]) -> Tensor:
    """Convert videos to values of -1 to 1, (videos, 3, FRAMES, SIZE_PX, SIZE_PX)."""
    values = torch.stack([pictures.pixels(frames) for frames in videos])
    return values.transpose(1, 2).contiguous().float() / 127.5 - 1


def build_vae() -> AutoencoderKLWan:
    """Make an untrained autoencoder with factors of 4 in time and 8 in height and width."""
    vae = AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=24,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    )
    nn.init.constant_(vae.quant_conv.bias[CHANNELS:], FIRST_LOG_VARIANCE)
    return vae


def train_vae(still_steps: int, steps: int, seed: int, log: Log) -> AutoencoderKLWan:
    """Train the autoencoder on drawn videos, measure its latents and freeze it.

    Args:
        still_steps: number of steps with single frames, 8 at a time.
        steps: total steps; later steps use whole videos, 4 at a time.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vae = build_vae()
    optimizer = Muon(vae, vae, rate=0.02, adam_rate=1e-3)

    def batch_loss(step: int) -> Loss:
        if step <= still_steps:
            real = pixels([[rng.choice(draw(sample(rng)[0], rng))] for _ in range(8)])
        else:
            real = pixels([draw(sample(rng)[0], rng) for _ in range(4)])
        posterior = vae.encode(real).latent_dist
        error = vae.decode(posterior.sample()).sample - real
        kl = (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean() / 2
        loss = _distance(error, real) + KL_WEIGHT * step / steps * kl
        return loss, lambda: pictures.describe(error, posterior)

    def share(step: int) -> float:
        return min(1.0, step / 30, 1.5 * (1 - (step - 1) / steps))

    fit("vae", steps, batch_loss, optimizer, log, share=share, log_every=50)
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


def polish_vae(vae: AutoencoderKLWan, steps: int, seed: int, log: Log) -> AutoencoderKLWan:
    """Continue the training of the decoder; the latents do not change."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    decoder = vae.decoder.train().requires_grad_(True)
    optimizer = Muon(decoder, decoder, rate=0.01, adam_rate=5e-4)

    def batch_loss(step: int) -> Loss:
        real = pixels([draw(sample(rng)[0], rng) for _ in range(4)])
        with torch.no_grad():
            latents = vae.encode(real).latent_dist.sample()
        error = vae.decode(latents).sample - real
        return _distance(error, real), lambda: f"L1 {error.abs().mean().item():.4f}"

    def share(step: int) -> float:
        return min(1.0, step / 30, 1.2 * (1 - (step - 1) / steps))

    fit("decoder", steps, batch_loss, optimizer, log, share=share, log_every=50)
    return vae.eval().requires_grad_(False)


def _distance(error: Tensor, real: Tensor) -> Tensor:
    """The mean error of videos; pixels in or next to the shape weigh more."""
    shape = (real - real[..., :1, :1]).abs().amax(1) > 0.05
    near = nn.functional.max_pool2d(shape.float(), 5, stride=1, padding=2)
    weight = 1 + (SHAPE_WEIGHT - 1) * near[:, None]
    return (weight * (error.abs() + error.square())).mean() / weight.mean()


def encode(vae: AutoencoderKLWan, videos: Sequence[list[Image.Image]]) -> Tensor:
    """Encode videos to the pipeline's latents, (videos, CHANNELS, 3, 6, 6), with unit spread."""
    with torch.no_grad():
        mean: Tensor = vae.encode(pixels(videos)).latent_dist.mean
    shape = (1, CHANNELS, 1, 1, 1)
    middle = torch.tensor(vae.config.latents_mean).view(shape)
    return (mean - middle) / torch.tensor(vae.config.latents_std).view(shape)
