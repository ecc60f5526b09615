"""The transformer of the video model: a small Wan trained by flow matching.

It has classifier-free guidance, two forwards per step, so some captions are dropped.
"""

import random
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from PIL import Image
from torch import Tensor, nn

from training.shapes.flow_matching import (
    FlowMatching,
    TrainingSchedule,
    TrainingSet,
    encode_examples,
)
from training.shapes.video.draw import draw, sample
from training.shapes.video.muon import Muon
from training.shapes.video.text import WIDTH, Encoder
from training.shapes.video.vae import CHANNELS, encode

RATES = 0.02, 2e-3  # peak learning rates: Muon, AdamW


def encode_videos(encoder: Encoder, vae: AutoencoderKLWan, count: int, seed: int) -> TrainingSet:
    """Draw and encode training videos, each with one caption."""

    rng = random.Random(seed)

    def example() -> tuple[str, list[Image.Image]]:
        scene, text = sample(rng)
        return text, draw(scene, rng)

    def encoded(videos: Sequence[list[Image.Image]]) -> Tensor:
        return encode(vae, videos).half()

    return encode_examples(count, example, encoded, lambda texts: (encoder.table(texts),), batch=50)


def build_transformer() -> WanTransformer3DModel:
    """Make an untrained transformer whose blocks are identities and whose output is zero.

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


class WanMatching(FlowMatching):
    """The video model in training."""

    def __init__(self, schedule: TrainingSchedule, examples: TrainingSet, seed: int) -> None:
        super().__init__(
            schedule, build_transformer, lambda model: Muon(model, model.blocks, *RATES), seed
        )
        self._examples, self._compiled = examples, torch.compile(self.model)

    def batch_loss(self) -> Tensor:
        rows = self.schedule.rows
        chosen = torch.randint(len(self._examples.latents), (rows,), generator=self.chance)
        z = self._examples.latents[chosen].float()
        noise = torch.randn(z.shape, generator=self.chance)
        t = torch.sigmoid(torch.randn(rows, generator=self.chance))  # share of noise
        x = torch.lerp(z, noise, t[:, None, None, None, None])
        [text] = self._examples.text(self.kept_captions(self._examples.caption[chosen]))
        out: Tensor = self._compiled(x, t * 1000, text, return_dict=False)[0]  # type: ignore[no-untyped-call]
        return nn.functional.mse_loss(out, noise - z)
