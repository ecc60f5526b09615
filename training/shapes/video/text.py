"""Tokenizer and text encoder of the video model.

The tokenizer is built from a word list: each word of a caption is one token, other words split
into letters. The encoder learns to classify the whole caption at every token, and is then
frozen: the transformer is trained on its outputs.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from training.shapes.draw import PALETTE
from training.shapes.fit import Log, Loss
from training.shapes.text import (
    T5_SIZES,
    captions_of_batch,
    t5_tokenizer,
    tokenize,
    train_classifier,
)
from training.shapes.video.draw import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    MovingShape,
    parse,
    sample,
)

WIDTH: int = T5_SIZES["d_model"]
WORDS = ("a", "an", "moving", "on", "background", *PALETTE, *SHAPES, *DIRECTIONS)
ANSWERS = (COLOURS, SHAPES, tuple(DIRECTIONS), (*BACKGROUNDS, None))  # fields of a `MovingShape`


class Encoder(nn.Module):
    """The text encoder with its tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = t5_tokenizer(WORDS)
        self.umt5 = UMT5EncoderModel(UMT5Config(vocab_size=len(self.tokenizer), **T5_SIZES))

    def forward(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encode captions like the pipeline: vectors (n, LENGTH, WIDTH), zero where padded.

        Returns:
            The vectors, and a mask of tokens without padding, (n, LENGTH).
        """
        tokens = tokenize(self.tokenizer, captions)
        mask = tokens.attention_mask
        vectors = self.umt5(tokens.input_ids, mask).last_hidden_state
        return vectors * mask[..., None], mask.bool()

    @torch.no_grad()
    def table(self, captions: Sequence[str]) -> Tensor:
        """Encode many captions."""
        return torch.cat([self(captions[at : at + 512])[0] for at in range(0, len(captions), 512)])


def _labels(scene: MovingShape) -> list[int]:
    """Class labels of a caption."""
    parts = (scene.colour, scene.shape, scene.direction, scene.background)
    return [names.index(part) for names, part in zip(ANSWERS, parts, strict=True)]


def train_text(steps: int, seed: int, log: Log, rows: int = 128) -> Encoder:
    """Train the encoder to classify captions, then freeze it."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    encoder = Encoder()
    heads = [nn.Linear(WIDTH, len(names)) for names in ANSWERS]

    def batch_loss(step: int) -> Loss:
        captions = captions_of_batch(rng, sample, rows)
        labels = torch.tensor([_labels(parse(text)) for text in captions])
        vectors, mask = encoder(captions)
        expected = labels[:, None].expand(-1, mask.shape[1], -1)[mask]  # (tokens, 4)
        named = [head(vectors[mask]) for head in heads]
        loss = torch.stack(
            [nn.functional.cross_entropy(out, expected[:, i]) for i, out in enumerate(named)]
        ).sum()

        def report() -> str:
            right = torch.stack([out.argmax(-1) == expected[:, i] for i, out in enumerate(named)])
            return f"captions named by a token {right.all(0).float().mean().item():.3f}"

        return loss, report

    train_classifier(encoder, heads, batch_loss, steps, log)
    return encoder
