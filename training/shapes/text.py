"""Tokenizers and text encoders of the embedded model.

Both tokenizers are built from word lists, so they are deterministic: each word of a
caption is one token, other words split into letters. Both encoders learn to classify
the content of captions, CLIP from its pooled vector and T5 at every token, and are then
frozen: the transformer is trained on their outputs.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel
from transformers import T5TokenizerFast as T5Tokenizer

from training.shapes.draw import PALETTE, SHAPES, Scene, parse, sample
from training.shapes.fit import AdamW, Log, Loss, fit

LENGTH = 16  # tokens of a caption; the longest needs 14
WORDS = ("a", "an", "on", "background", "left", "right", "of", *PALETTE, *SHAPES)
COLOURS = tuple(PALETTE)
SIDES = ("only", "left", "right", "background")
T5_SIZES: dict[str, Any] = {  # T5 encoders of both models
    "d_model": 96,
    "d_kv": 24,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def clip_tokenizer() -> CLIPTokenizer:
    """Build the CLIP tokenizer: every word of a caption one token, bytes for the rest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        parts = [*word[:-1], word[-1] + "</w>"]
        for merge in merges:  # applies the merges of earlier words
            parts = _join(parts, merge)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = _join(parts, merges[-1])
            pieces.append(parts[0])
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    vocab |= {piece: at for at, piece in enumerate(pieces, start=len(vocab))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=LENGTH)


def _join(parts: list[str], merge: tuple[str, str]) -> list[str]:
    """Apply one merge of byte pair encoding to a word."""
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == merge:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def t5_tokenizer(words: Sequence[str] = WORDS) -> T5Tokenizer:
    """Build a T5 tokenizer: every word of a caption one piece, characters for the rest."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [("▁" + word, -3.0) for word in (*words, *(word.title() for word in words))]
    pieces += [(chr(code), -6.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)


def tokenize(tokenizer: Any, captions: Sequence[str]) -> Any:
    """Convert captions to `input_ids` and `attention_mask`, (captions, LENGTH) each."""
    return tokenizer(
        list(captions),
        padding="max_length",
        max_length=LENGTH,
        truncation=True,
        return_tensors="pt",
    )


class Encoders(nn.Module):
    """Both text encoders with their tokenizers."""

    def __init__(self) -> None:
        super().__init__()
        self.clip_tokenizer, self.t5_tokenizer = clip_tokenizer(), t5_tokenizer()
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(self.clip_tokenizer),
                hidden_size=96,
                intermediate_size=256,
                projection_dim=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=LENGTH,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
            )
        )
        self.t5 = T5EncoderModel(T5Config(vocab_size=len(self.t5_tokenizer), **T5_SIZES))

    def ids(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Convert captions to CLIP and T5 token ids, (captions, LENGTH) each."""
        clip, t5 = (
            tokenize(tokenizer, captions).input_ids
            for tokenizer in (self.clip_tokenizer, self.t5_tokenizer)
        )
        return clip, t5

    def forward(self, clip_ids: Tensor, t5_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Encode ids into pooled vectors (n, 96) and token vectors (n, LENGTH, 96)."""
        pooled: Tensor = self.clip(clip_ids).pooler_output
        tokens: Tensor = self.t5(t5_ids).last_hidden_state
        return pooled, tokens

    @torch.no_grad()
    def table(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encode many captions, as half-precision pooled and token vectors."""
        parts = [self(*self.ids(captions[at : at + 512])) for at in range(0, len(captions), 512)]
        pooled, tokens = (torch.cat(part).half() for part in zip(*parts, strict=True))
        return pooled, tokens


def _pooled_labels(scene: Scene) -> list[int]:
    """Class labels for the pooled vector; the last class of each means absent."""
    labels = [COLOURS.index(scene.background) if scene.background else len(COLOURS)]
    for item in scene.items:
        labels += [COLOURS.index(item.colour), SHAPES.index(item.shape)]
    return labels + [len(COLOURS), len(SHAPES)] * (2 - len(scene.items))


def _token_labels(text: str, scene: Scene) -> list[list[int]]:
    """Class labels for each word's vector: colour, shape and side of its item."""
    nothing = [len(COLOURS), len(SHAPES), len(SIDES)]
    items = [
        [COLOURS.index(item.colour), SHAPES.index(item.shape), at if len(scene.items) > 1 else 0]
        for at, item in enumerate(scene.items, start=1)
    ]
    words, labels = text.lower().split(), []
    if "right" in words:
        items.reverse()
    item = items.pop(0)
    for word in words:
        if word == "on":
            assert scene.background is not None
            item = [COLOURS.index(scene.background), len(SHAPES), SIDES.index("background")]
        if word in ("left", "right", "of"):
            labels.append(nothing)
            item = items[0]
        else:
            labels.append(item)
    return labels + [nothing] * (LENGTH - len(labels))


def captions_of_batch(
    rng: random.Random, sample: Callable[[random.Random], tuple[Any, str]], rows: int
) -> list[str]:
    """Draw captions, some capitalised."""
    captions = [sample(rng)[1] for _ in range(rows)]
    return [text.capitalize() if rng.random() < 0.1 else text for text in captions]


def train_classifier(
    encoder: nn.Module,
    heads: Sequence[nn.Module],
    batch_loss: Callable[[int], Loss],
    steps: int,
    log: Log,
) -> None:
    """Train an encoder with heads that classify captions, then freeze it."""
    weights = list(nn.ModuleList([encoder, *heads]).parameters())
    optimizer = AdamW(weights, 2e-3, (steps, 0.05), weight_decay=0.01)
    fit("text", steps, batch_loss, optimizer, log)
    encoder.eval().requires_grad_(False)


def train_text(steps: int, seed: int, log: Log, rows: int = 128) -> Encoders:
    """Train both encoders to classify captions, then freeze them."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    encoders = Encoders()
    c, s = len(COLOURS), len(SHAPES)
    # background, then colour and shape of the left (or only) and of the right item
    pooled_heads = [nn.Linear(96, n + 1) for n in (c, c, s, c, s)]
    # classes of a word's item: colour, shape, side
    token_heads = [nn.Linear(96, n + 1) for n in (c, s, len(SIDES))]
    cross_entropy = nn.functional.cross_entropy

    def batch_loss(step: int) -> Loss:
        captions = captions_of_batch(rng, sample, rows)
        stated = [parse(text) for text in captions]
        pooled, tokens = encoders(*encoders.ids(captions))
        targets = torch.tensor([_pooled_labels(scene) for scene in stated])
        words = torch.tensor(
            [_token_labels(text, scene) for text, scene in zip(captions, stated, strict=True)]
        )
        named = [head(pooled) for head in pooled_heads]
        bound = [head(tokens).flatten(0, 1) for head in token_heads]
        loss = torch.zeros(())
        for i, out in enumerate(named):
            loss = loss + cross_entropy(out, targets[:, i])
        for i, out in enumerate(bound):
            loss = loss + cross_entropy(out, words[..., i].flatten())

        def report() -> str:
            right = torch.stack([out.argmax(-1) == targets[:, i] for i, out in enumerate(named)])
            bindings = torch.stack(
                [out.argmax(-1) == words[..., i].flatten() for i, out in enumerate(bound)]
            )
            return (
                f"captions named by CLIP {right.all(0).float().mean():.3f}, words bound by T5"
                f" {bindings.all(0).float().mean():.4f}"
            )

        return loss, report

    train_classifier(encoders, [*pooled_heads, *token_heads], batch_loss, steps, log)
    return encoders
