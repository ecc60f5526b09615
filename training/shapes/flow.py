"""The transformer of the embedded model: a small FLUX trained by flow matching.

Guidance is part of the model, as in FLUX.1-dev: it reads the guidance scale g as an
input. Once it can draw, part of each batch learns the guided velocity
v("") + g (v(caption) - v("")) from the averaged model itself, so one forward a step
is enough and g = 1 stays the plain model.

Source: model guidance, Tang et al., arXiv:2502.12154, 2025; guidance distillation,
Meng et al., arXiv:2210.03142, 2022.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from training.shapes.draw import draw, sample
from training.shapes.text import LENGTH, Encoders
from training.shapes.vae import CHANNELS, pixels

GRID = 4  # image tokens a side; each is 2x2 latent pixels
WIDTH = CHANNELS * 4  # channels of an image token
NOMINAL_GUIDANCE = 3.5
NOISE_SHARE = 0.25  # of the autoencoder's noise, on the latents trained on


@dataclass(frozen=True, slots=True)
class Plan:
    """When what happens, in optimizer steps."""

    steps: int
    calm_from: int  # first step with scenes that vary less
    guided_from: int  # first step that teaches guidance
    decay_from: int  # the learning rate falls in a line from here to the end
    warmup: int = 300
    rows: int = 64
    peak: float = 2e-3
    ema: float = 0.999
    dropout: float = 0.1  # of captions, replaced by the empty one

    def rate(self, step: int) -> float:
        """Give the learning rate of a step, counted from 1."""
        left = (self.steps - step + 1) / (self.steps - self.decay_from + 1)
        return self.peak * min(1.0, step / self.warmup, max(left, 0.01))


@dataclass(slots=True)
class Pool:
    """Encoded scenes with the encodings of their captions, in half precision."""

    latents: Tensor  # (scenes, GRID * GRID, WIDTH), zero mean and unit spread
    noise: float  # spread of what is added to them, in the same unit
    caption: Tensor  # (scenes,), row of the tables
    pooled: Tensor  # (captions, 96); row 0 is the empty caption
    tokens: Tensor  # (captions, LENGTH, 96)


def build_transformer() -> FluxTransformer2DModel:
    """Make an untrained transformer, whose blocks do nothing yet and whose output is zero.

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


def make_pool(
    encoders: Encoders, vae: AutoencoderKL, *, count: int, seed: int, spread: float, alone: float
) -> Pool:
    """Draw and encode scenes to train on, each with one caption.

    Args:
        count: scenes.
        spread: how much sizes and places vary, see `draw`.
        alone: share of scenes with one shape.
    """
    rng = random.Random(seed)
    vae = vae.to(memory_format=torch.channels_last)
    rows, latents, noise = {"": 0}, [], 0.0
    caption = torch.zeros(count, dtype=torch.long)
    for start in range(0, count, 100):
        images = []
        for at in range(start, min(start + 100, count)):
            scene, text = sample(rng, alone)
            images.append(draw(scene, rng, spread))
            caption[at] = rows.setdefault(text, len(rows))
        with torch.no_grad():
            shown = pixels(images).float() / 127.5 - 1
            posterior = vae.encode(shown.to(memory_format=torch.channels_last)).latent_dist
        mean = (posterior.mean - vae.config.shift_factor) * vae.config.scaling_factor
        latents.append(pack(mean).half())
        spread = posterior.std.mean().item() * vae.config.scaling_factor
        noise += NOISE_SHARE * spread * len(images) / count
    return Pool(torch.cat(latents), noise, caption, *encoders.table(list(rows)))


def velocity(
    model: FluxTransformer2DModel, x: Tensor, t: Tensor, g: Tensor, text: Sequence[Tensor]
) -> Tensor:
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


class Flow:
    """A transformer in training; `state` and `load` let it stop and go on."""

    def __init__(self, plan: Plan, varied: Pool, calm: Pool, seed: int) -> None:
        torch.manual_seed(seed)
        self.plan, self.step, self.loss = plan, 0, 1.0
        self._varied, self._calm = varied, calm
        self.chance = torch.Generator().manual_seed(seed)
        self.model = build_transformer()
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
        # one compiled shape each: pictures are drawn with the plain `ema`
        self._student, self._teacher = torch.compile(self.model), torch.compile(self.ema)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), plan.peak, betas=(0.9, 0.99), weight_decay=0.01, fused=True
        )

    @property
    def pool(self) -> Pool:
        """What the present step is trained on."""
        return self._calm if self.step >= self.plan.calm_from else self._varied

    def state(self) -> dict[str, object]:
        """Give all that the next step depends on."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "ema", "optimizer")}
        return parts | {"step": self.step, "loss": self.loss, "chance": self.chance.get_state()}

    def load(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        for name in ("model", "ema", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.loss = state["step"], state["loss"]  # type: ignore[assignment]
        self.chance.set_state(state["chance"])  # type: ignore[arg-type]

    def advance(self) -> None:
        """Take one optimizer step."""
        self.step += 1
        plan, pool, rows = self.plan, self.pool, self.plan.rows
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rate(self.step)
        draw_rows = torch.randint(len(pool.latents), (rows,), generator=self.chance)
        z = pool.latents[draw_rows].float()
        z = z + pool.noise * torch.randn(z.shape, generator=self.chance)
        n = torch.randn(z.shape, generator=self.chance)
        t = torch.sigmoid(torch.randn(rows, generator=self.chance))
        g = 1 + 4 * torch.rand(rows, generator=self.chance)
        g[: rows // 4] = 1.0
        x = torch.lerp(z, n, t[:, None, None])
        target = n - z
        captions = pool.caption[draw_rows]
        kept = torch.rand(rows, generator=self.chance) >= plan.dropout
        captions = captions * kept
        if self.step >= plan.guided_from:
            taught = slice(rows // 2, rows)  # the other half stays plain, at g = 1
            g[: rows // 2] = 1.0
            target[taught] += self._guidance(x[taught], t[taught], g[taught], captions[taught])
        text = pool.pooled[captions].float(), pool.tokens[captions].float()
        loss = nn.functional.mse_loss(velocity(self._student, x, t, g, text), target)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss += 0.01 * (loss.item() - self.loss)
        decay = min(plan.ema, self.step / (self.step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.ema.parameters()), list(self.model.parameters()), 1 - decay
            )

    @torch.no_grad()
    def _guidance(self, x: Tensor, t: Tensor, g: Tensor, captions: Tensor) -> Tensor:
        """Give what guidance adds to the velocity of each row; nothing without a caption."""
        both = torch.cat([captions, torch.zeros_like(captions)])
        text = self.pool.pooled[both].float(), self.pool.tokens[both].float()
        v = velocity(self._teacher, x.repeat(2, 1, 1), t.repeat(2), torch.ones(len(both)), text)
        said, silent = v.chunk(2)
        return (g - 1)[:, None, None] * (said - silent)


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
