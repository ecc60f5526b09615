"""Pipelines that write a text before they draw, with tiny language models of many classes.

An `Author` lets its model write one of its texts, with settings of the text's own, and draws a few
steps. Its answer holds the tokens, so that they can be compared with those of plain `generate`.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from support.tiny.parts import part

_WORDS = 300  # of a vocabulary
_DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
MODELS: dict[str, Any] = _DATA["models"]
OTHERS: dict[str, Any] = _DATA["others"]
Text = Mapping[str, Any]


@cache
def _model(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = part({**MODELS, **OTHERS}[name]["recipe"])
    for path, weight in made.named_parameters():
        weight.requires_grad_(False)
        if re.search(r"(q_proj|qkv|\.q|c_attn)\.weight$", path):
            weight.mul_(4.0)  # so that places count: attention picks out few tokens
    return made.eval()


def model(name: str) -> nn.Module:
    """One of `MODELS` or `OTHERS`, with the same weights at every call."""
    made: nn.Module = _model(name)
    return copy.deepcopy(made)


def texts(name: str, count: int = 6) -> list[Text]:
    """Arguments of `generate` for texts of their own lengths, samplers and ends."""
    if name == "glm":
        return [_plan(i) for i in range(count)]
    made: list[Text] = []
    for i in range(count):
        ids = torch.tensor([[5 + (7 * i + 3 * j) % 200 for j in range(4 + 3 * i)]])
        settings: dict[str, Any] = {"do_sample": False}
        if i % 3:
            settings = {"do_sample": True, "temperature": 0.6 + 0.2 * i, "top_k": 4 + 5 * i}
        if i == 4:
            settings |= {"eos_token_id": list(range(0, 200, 5))}  # a word that ends it
        else:
            settings |= {"min_new_tokens": 6 + 4 * i}
        text: Text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name in SEEING and i % 2:
            text = SEEING[name](text, i)
        made.append({**text, "max_new_tokens": 6 + 4 * i, "pad_token_id": 0, **settings})
    return made


def _picture(text: Text, i: int) -> Text:
    """A picture of its own size before a text of Qwen 2.5 VL."""
    config = _model("qwen2.5-vl").config
    high, wide = [(4, 4), (8, 4), (4, 8)][i // 2 % 3]
    count = high * wide // 4
    start, pad, end = (
        config.vision_start_token_id,
        config.image_token_id,
        config.vision_end_token_id,
    )
    ids = torch.cat([torch.tensor([[start, *[pad] * count, end]]), text["input_ids"]], 1)
    patch = 3 * 2 * config.vision_config.patch_size**2
    noise = torch.randn(high * wide, patch, generator=torch.Generator().manual_seed(i))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.eq(ids, pad).long(),
        "pixel_values": noise,
        "image_grid_thw": torch.tensor([[1, high, wide]]),
    }


def _tiles(text: Text, i: int) -> Text:
    """A picture of one or two tiles before a text of Llama 3.2."""
    ids = torch.cat([torch.tensor([[_WORDS - 1]]), text["input_ids"]], 1)
    tiles, shown = 1 + i // 2 % 2, torch.zeros(1, ids.shape[1], 1, 2, dtype=torch.long)
    shown[..., :tiles] = 1
    noise = torch.randn(1, 1, 2, 3, 16, 16, generator=torch.Generator().manual_seed(i))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": noise,
        "aspect_ratio_ids": torch.tensor([[tiles]]),
        "aspect_ratio_mask": shown[:, 0],
        "cross_attention_mask": shown,
    }


SEEING: dict[str, Callable[[Text, int], Text]] = {"qwen2.5-vl": _picture, "mllama": _tiles}


def _plan(i: int) -> Text:
    """A picture of its own size, planned small first, as GLM-Image has it."""
    high, wide = [(4, 4), (2, 4), (4, 2)][i % 3]
    ids = torch.tensor([[130 + j for j in range(3 + i)]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, high, wide], [1, 2, 2]]),
        "images_per_sample": torch.tensor([2]),
        "max_new_tokens": high * wide + 4 + 1,
        "do_sample": True,
    }


class Denoiser(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Draws with a matrix."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight(x).tanh()
        return y


class Author(DiffusionPipeline):  # type: ignore[misc]
    """Writes a text, then draws; or only draws, where it is asked for none."""

    def __init__(self, text_encoder: nn.Module, transformer: nn.Module) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder, transformer=transformer)
        self.texts: list[Text] = []

    def __call__(
        self,
        prompt: str = "",
        num_inference_steps: int = 3,
        generator: torch.Generator | None = None,
    ) -> dict[str, Any]:
        x = torch.randn(1, 4, generator=generator)
        text = torch.zeros(1, 0, dtype=torch.long)
        if prompt:
            text = self.text_encoder.generate(**self.texts[int(prompt)])
        for _ in range(num_inference_steps):
            x = self.transformer(x)
        return {"images": x, "text": text}


class Exactly(Author):
    """Gives the logits, too, from which its tokens were drawn."""

    def __call__(self, prompt: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        with torch.no_grad():
            text = self.text_encoder.generate(
                **self.texts[int(prompt)], output_logits=True, return_dict_in_generate=True
            )
        return {"images": torch.stack(text.logits), "text": text.sequences}


def author(name: str, count: int = 6, kind: Any = Author) -> Author:
    """A pipeline around one of `MODELS`, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        pipe: Author = kind(model(name), Denoiser().requires_grad_(False).eval())
    pipe.texts = texts(name, count)
    return pipe


@cache
def alone(name: str, number: int, seed: int) -> dict[str, Any]:
    """What plain code gives for a text of a model."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return author(name)(str(number), generator=torch.Generator().manual_seed(seed))


def assert_as_alone(heard: list[Any], judge: Author, *, gap: float = 1e-4) -> None:
    """Texts 0, 1, ..., with these seeds, are those of plain code, as are pictures or logits."""
    for number, recorder in enumerate(heard):
        torch.manual_seed(number)
        with torch.no_grad():
            expected = judge(str(number), generator=torch.Generator().manual_seed(number))
        assert recorder.error is None
        assert recorder.outcome.warnings == ()
        assert recorder.outcome.fields["text"].tolist() == expected["text"].tolist()
        torch.testing.assert_close(recorder.image, expected["images"], atol=gap, rtol=gap)
