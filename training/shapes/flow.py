"""The transformer of the embedded model: a small FLUX trained by flow matching.

Guidance is part of the model, as in FLUX.1-dev: the guidance scale g is an input. After
the plain training, part of each batch learns the guided velocity
v("") + g (v(caption) - v("")) from the averaged model itself, so one forward per step
is enough, and g = 1 remains the plain model.

Source: model guidance, Tang et al., arXiv:2502.12154, 2025; guidance distillation,
Meng et al., arXiv:2210.03142, 2022.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from training.shapes.draw import draw, sample
from training.shapes.flow_matching import FlowMatching, TrainingSet, encode_examples
from training.shapes.text import LENGTH, Encoders
from training.shapes.vae import CHANNELS, pixels

GRID = 4  # image tokens per side; each is 2x2 latent pixels
WIDTH = CHANNELS * 4  # channels of an image token
NOMINAL_GUIDANCE = 3.5
NOISE_SHARE = 0.25  # noise on training latents, relative to the autoencoder's
PEAK = 2e-3  # learning rate


def build_transformer() -> FluxTransformer2DModel:
    """Make an untrained transformer whose blocks are identities and whose output is zero.

    Source: adaLN-Zero, Peebles and Xie, arXiv:2212.09748, 2022.
    """
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=WIDTH,
        num_layers=2,
        num_single_layers=6,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=96,
        pooled_projection_dim=96,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=True,
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if "norm" in name or name == "proj_out":
                nn.init.zeros_(module.weight)
    return model


def pack(latents: Tensor) -> Tensor:
    """Turn latents (n, CHANNELS, 8, 8) into tokens (n, GRID * GRID, WIDTH), like the pipeline."""
    blocks = latents.reshape(-1, CHANNELS, GRID, 2, GRID, 2).permute(0, 2, 4, 1, 3, 5)
    return blocks.reshape(-1, GRID * GRID, WIDTH)


def unpack(tokens: Tensor) -> Tensor:
    """Undo `pack`."""
    blocks = tokens.reshape(-1, GRID, GRID, CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return blocks.reshape(-1, CHANNELS, GRID * 2, GRID * 2)


def encode_scenes(
    encoders: Encoders, vae: AutoencoderKL, *, count: int, seed: int, spread: float, alone: float
) -> TrainingSet:
    """Draw and encode training scenes, each with one caption.

    Args:
        count: number of scenes.
        spread: variation of sizes and positions of the first 100, see `draw`. The rest vary by
            the spread of the autoencoder's noise: so the embedded model was trained.
        alone: fraction of scenes with one shape.
    """
    vae, rng, noise = vae.to(memory_format=torch.channels_last), random.Random(seed), 0.0

    def draw_example() -> tuple[str, Image.Image]:
        scene, text = sample(rng, alone)
        return text, draw(scene, rng, spread)

    @torch.no_grad()
    def encode(images: Sequence[Image.Image]) -> Tensor:
        nonlocal spread, noise
        values = pixels(images).float() / 127.5 - 1
        posterior = vae.encode(values.to(memory_format=torch.channels_last)).latent_dist
        mean = (posterior.mean - vae.config.shift_factor) * vae.config.scaling_factor
        spread = posterior.std.mean().item() * vae.config.scaling_factor
        noise += NOISE_SHARE * spread * len(images) / count
        return pack(mean).half()

    return replace(encode_examples(count, draw_example, encode, encoders.table), noise=noise)


def velocity(model: nn.Module, x: Tensor, t: Tensor, g: Tensor, text: Sequence[Tensor]) -> Tensor:
    """Run the transformer as the pipeline does.

    Args:
        x: (n, GRID * GRID, WIDTH) noisy tokens.
        t: (n,) share of noise, 0 to 1.
        g: (n,) guidance scale.
        text: pooled (n, 96) and token vectors (n, LENGTH, 96).
    """
    ids = torch.zeros(GRID, GRID, 3)
    ids[..., 1] += torch.arange(GRID)[:, None]
    ids[..., 2] += torch.arange(GRID)
    out: Tensor = model(
        hidden_states=x,
        timestep=t,
        guidance=g,
        pooled_projections=text[0],
        encoder_hidden_states=text[1],
        img_ids=ids.reshape(-1, 3),
        txt_ids=torch.zeros(LENGTH, 3),
        return_dict=False,
    )[0]
    return out


class FluxMatching(FlowMatching):
    """A FLUX transformer in training, first plain, then also with its own guidance.

    `student` is trained; it learns the guidance of `teacher`; both may be compiled.

    Args:
        examples: returns the training set of a step.
        guided_from: first step with guidance.
        plain_rows: rows of each batch that are always at g = 1.
    """

    def __init__(
        self,
        *args: Any,
        examples: Callable[[int], TrainingSet],
        guided_from: int,
        plain_rows: int = 0,
    ) -> None:
        super().__init__(*args)
        self._examples, self._guided_from, self._plain_rows = examples, guided_from, plain_rows
        self.student, self.teacher = self.model, self.ema

    def batch_loss(self) -> Tensor:
        examples, rows = self._examples(self.step), self.schedule.rows
        chance = self.chance
        chosen = torch.randint(len(examples.latents), (rows,), generator=chance)
        z = examples.latents[chosen].float()
        z = z + examples.noise * torch.randn(z.shape, generator=chance)
        n = torch.randn(z.shape, generator=chance)
        t = torch.sigmoid(torch.randn(rows, generator=chance))
        g = 1 + 4 * torch.rand(rows, generator=chance)
        g[: self._plain_rows] = 1.0
        x, target = torch.lerp(z, n, t[:, None, None]), n - z
        captions = self.kept_captions(examples.caption[chosen])
        if self.step >= self._guided_from:
            taught = slice(rows // 2, rows)  # the first half stays at g = 1
            g[: rows // 2] = 1.0
            target[taught] += self._guidance(x[taught], t[taught], g[taught], captions[taught])
        text = examples.text(captions)
        return nn.functional.mse_loss(velocity(self.student, x, t, g, text), target)

    @torch.no_grad()
    def _guidance(self, x: Tensor, t: Tensor, g: Tensor, captions: Tensor) -> Tensor:
        """The change of each row's velocity by guidance; zero without a caption."""
        both = torch.cat([captions, torch.zeros_like(captions)])
        text = self._examples(self.step).text(both)
        v = velocity(self.teacher, x.repeat(2, 1, 1), t.repeat(2), torch.ones(len(both)), text)
        conditional, unconditional = v.chunk(2)
        return (g - 1)[:, None, None] * (conditional - unconditional)


@torch.no_grad()
def generate(
    model: FluxTransformer2DModel,
    vae: AutoencoderKL,
    text: Sequence[Tensor],
    *,
    seed: int = 0,
    guidance: float = NOMINAL_GUIDANCE,
    steps: int = 28,
) -> list[Image.Image]:
    """Draw one picture for each row of `text` with the pipeline's default sampling."""
    rows = len(text[0])
    x = torch.randn(rows, GRID * GRID, WIDTH, generator=torch.Generator().manual_seed(seed))
    sigmas = [*torch.linspace(1, 1 / steps, steps).tolist(), 0.0]
    for now, after in pairwise(sigmas):
        v = velocity(model, x, torch.full((rows,), now), torch.full((rows,), guidance), text)
        x = x + (after - now) * v
    latents = unpack(x) / vae.config.scaling_factor + vae.config.shift_factor
    decoded = vae.decode(latents).sample.clamp(-1, 1).permute(0, 2, 3, 1)
    return [Image.fromarray(p.numpy()) for p in ((decoded + 1) * 127.5).round().byte()]
