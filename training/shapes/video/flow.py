"""The transformer of the video model: a small Wan trained by flow matching.

Guidance is the plain one, two forwards a step, so captions are left out now and then.
"""

import copy
import random
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn

from training.shapes.video.draw import draw, sample
from training.shapes.video.muon import Muon
from training.shapes.video.text import WIDTH, Encoder
from training.shapes.video.vae import CHANNELS, encode


@dataclass(frozen=True, slots=True)
class Plan:
    """When what happens, in optimizer steps."""

    steps: int
    warmup: int = 100
    decay_from: float = 0.4  # of all steps; the learning rates fall in a line from here on
    rows: int = 64
    rate: float = 0.02  # of Muon, at its highest
    adam_rate: float = 2e-3
    ema: float = 0.997
    dropout: float = 0.1  # of captions, replaced by the empty one

    def share(self, step: int) -> float:
        """Give the share of the highest learning rates for a step, counted from 1."""
        left = (self.steps - step + 1) / (self.steps * (1 - self.decay_from))
        return min(1.0, step / self.warmup, left)


@dataclass(slots=True)
class Pool:
    """Encoded clips with the encodings of their captions."""

    latents: Tensor  # (clips, CHANNELS, 3, 6, 6), half precision, unit spread
    caption: Tensor  # (clips,), row of the table
    vectors: Tensor  # (captions, LENGTH, WIDTH); row 0 is the empty caption


def make_pool(encoder: Encoder, vae: AutoencoderKLWan, count: int, seed: int) -> Pool:
    """Draw and encode clips to train on, each with one caption."""
    rng = random.Random(seed)
    rows, latents = {"": 0}, []
    caption = torch.zeros(count, dtype=torch.long)
    for start in range(0, count, 50):
        videos = []
        for at in range(start, min(start + 50, count)):
            clip, text = sample(rng)
            videos.append(draw(clip, rng))
            caption[at] = rows.setdefault(text, len(rows))
        latents.append(encode(vae, videos).half())
    return Pool(torch.cat(latents), caption, encoder.table(list(rows)))


def build_transformer() -> WanTransformer3DModel:
    """Make an untrained transformer, whose blocks do nothing yet and whose output is zero.

    Source: adaLN-Zero, Peebles and Xie, arXiv:2212.09748, 2022.
    """
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=5,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=WIDTH,
        freq_dim=128,
        ffn_dim=640,
        num_layers=6,
        rope_max_seq_len=64,
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if name.endswith(("time_proj", "attn2.to_out.0")) or name == "proj_out":
                nn.init.zeros_(module.weight)
    for block in model.blocks:
        nn.init.zeros_(block.scale_shift_table)
    return model


class Flow:
    """A transformer in training; `state` and `load` let it stop and go on."""

    def __init__(self, plan: Plan, pool: Pool, seed: int) -> None:
        torch.manual_seed(seed)
        self.plan, self.pool, self.step, self.loss = plan, pool, 0, 1.0
        self.chance = torch.Generator().manual_seed(seed)
        self.model = build_transformer()
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
        self._compiled = torch.compile(self.model)
        self.optimizer = Muon(self.model, self.model.blocks, plan.rate, plan.adam_rate)

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
        chosen = torch.randint(len(pool.latents), (rows,), generator=self.chance)
        z = pool.latents[chosen].float()
        noise = torch.randn(z.shape, generator=self.chance)
        t = torch.sigmoid(torch.randn(rows, generator=self.chance))  # share of noise
        x = torch.lerp(z, noise, t[:, None, None, None, None])
        kept = torch.rand(rows, generator=self.chance) >= plan.dropout
        text = pool.vectors[pool.caption[chosen] * kept]
        out: Tensor = self._compiled(x, t * 1000, text, return_dict=False)[0]  # type: ignore[no-untyped-call]
        loss = nn.functional.mse_loss(out, noise - z)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(plan.share(self.step))
        self.loss += 0.01 * (loss.item() - self.loss)
        decay = min(plan.ema, self.step / (self.step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.ema.parameters()), list(self.model.parameters()), 1 - decay
            )
