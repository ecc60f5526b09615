"""Tokenizer and text encoder of the video model.

The tokenizer is built from a word list: each word of a caption is one token, anything else
falls into letters. The encoder learns to name at every token what the whole caption says, and
is then frozen: the transformer is trained on its outputs.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import T5TokenizerFast as T5Tokenizer
from transformers import UMT5Config, UMT5EncoderModel

from training.shapes.draw import PALETTE
from training.shapes.text import Log
from training.shapes.video.draw import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Clip,
    parse,
    sample,
)

LENGTH = 16  # tokens of a caption, padding included; the longest needs 10
WIDTH = 96
WORDS = ("a", "an", "moving", "on", "background", *PALETTE, *SHAPES, *DIRECTIONS)
ANSWERS = (COLOURS, SHAPES, tuple(DIRECTIONS), (*BACKGROUNDS, None))  # as in a `Clip`


def build_tokenizer() -> T5Tokenizer:
    """Make the tokenizer: every word of a caption one piece, characters for the rest."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [("▁" + word, -3.0) for word in (*WORDS, *(word.title() for word in WORDS))]
    pieces += [(chr(code), -6.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)


class Encoder(nn.Module):
    """The text encoder with its tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = build_tokenizer()
        self.umt5 = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(self.tokenizer),
                d_model=WIDTH,
                d_kv=24,
                d_ff=256,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=0,
                eos_token_id=1,
            )
        )

    def forward(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encode captions like the pipeline: vectors (n, LENGTH, WIDTH), zero where padded.

        Returns:
            The vectors, and which of them stand for a token, (n, LENGTH).
        """
        tokens = self.tokenizer(
            list(captions),
            padding="max_length",
            max_length=LENGTH,
            truncation=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask
        vectors = self.umt5(tokens.input_ids, mask).last_hidden_state
        return vectors * mask[..., None], mask.bool()

    @torch.no_grad()
    def table(self, captions: Sequence[str]) -> Tensor:
        """Encode many captions."""
        return torch.cat([self(captions[at : at + 512])[0] for at in range(0, len(captions), 512)])


def _labels(clip: Clip) -> list[int]:
    """Number what a caption says."""
    parts = (clip.colour, clip.shape, clip.direction, clip.background)
    return [names.index(part) for names, part in zip(ANSWERS, parts, strict=True)]


def train_text(steps: int, seed: int, log: Log, rows: int = 128) -> Encoder:
    """Teach the encoder to name what captions say, then freeze it."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    encoder = Encoder()
    heads = nn.ModuleList(nn.Linear(WIDTH, len(names)) for names in ANSWERS)
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, 2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.05)
    for step in range(1, steps + 1):
        captions = [sample(rng)[1] for _ in range(rows)]
        labels = torch.tensor([_labels(parse(text)) for text in captions])
        captions = [text.capitalize() if rng.random() < 0.1 else text for text in captions]
        vectors, mask = encoder(captions)
        wanted = labels[:, None].expand(-1, LENGTH, -1)[mask]  # (tokens, 4)
        named = [head(vectors[mask]) for head in heads]
        loss = torch.stack(
            [nn.functional.cross_entropy(out, wanted[:, i]) for i, out in enumerate(named)]
        ).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            right = torch.stack([out.argmax(-1) == wanted[:, i] for i, out in enumerate(named)])
            share = right.all(0).float().mean().item()
            log(f"text step {step} loss {loss.item():.4f} captions named by a token {share:.3f}")
    return encoder.eval().requires_grad_(False)
