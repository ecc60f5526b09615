"""Denoisers that keep keys and values share forwards, each request with its own."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImage21Pipeline
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import BatchEncoding

from carpool.engine.numerics import DATA, ROWS, Exact
from carpool.engine.per_call import PerCall, give_back, mapped
from carpool.errors import Cancelled, PipelineFailed
from support.engine_driver import driving
from support.tiny import ARGUMENTS, tiny_pipeline
from support.tiny.parts import qwen2_tokenizer

PROMPTS = ["a cat", "a photo of a dog in the rain", "the sea", "an astronaut riding a horse", ""]
_pixels = np.random.RandomState(0).randint(0, 255, (5, 64, 64, 3), np.uint8)


class TextReader:
    """The part of Qwen's processor that reads prompts without pictures."""

    def __init__(self) -> None:
        self.tokenizer = qwen2_tokenizer()

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        return [self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)]

    def __call__(self, text: list[str], **options: Any) -> BatchEncoding:
        return self.tokenizer(text, **options)


def qwen() -> DiffusionPipeline:
    return tiny_pipeline("qwen_21", processor=TextReader())


def arguments(pipe: DiffusionPipeline, place: int) -> dict[str, Any]:
    request = {"prompt": PROMPTS[place], "num_inference_steps": 3 + place, "output_type": "pt"}
    if not isinstance(pipe, QwenImage21Pipeline):
        return {**ARGUMENTS["flux2_klein_kv"], **request, "image": Image.fromarray(_pixels[place])}
    guided = {"negative_prompt": "bad and blurry", "true_cfg_scale": 3.0} if place == 2 else {}
    return {**request, "height": 64, "width": 32 if place == 4 else 64, **guided}


def break_down(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 1:
        raise ArithmeticError("a puncture")
    return tensors


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("make", [qwen, partial(tiny_pipeline, "flux2_klein_kv")])
def test_requests_with_caches_get_what_plain_diffusers_gives_and_share_forwards(
    make: Callable[[], DiffusionPipeline], numerics: str
) -> None:
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    seeds = [torch.Generator().manual_seed(place) for place in range(5)]
    alone = [pipe(**arguments(pipe, i), generator=seed).images for i, seed in enumerate(seeds)]

    with driving(pipe, max_running=16, numerics=numerics) as drive:
        by_itself = []
        for place in range(5):
            by_itself.append(drive.submit(**arguments(pipe, place), seed=place))
            drive.finish()
        for _ in range(3 if numerics == "exact" else 1):  # until it is proven
            drive.forwards.clear()
            requests = [drive.submit(**arguments(pipe, i), seed=i) for i in range(5)]
            late = {**arguments(pipe, 1), "num_inference_steps": 9}
            cancelled = drive.submit(**late, seed=8, request_id="late")
            failing = drive.submit(**late, seed=9, callback_on_step_end=break_down)
            drive.turn_until(lambda: cancelled.step >= 3)  # noqa: B023
            drive.engine.cancel("late")
            drive.finish()
            widths = [f.requests for f in drive.forwards if f.component == "transformer"]

    for request, own, image in zip(requests, by_itself, alone, strict=True):
        assert request.error is None
        assert request.outcome.warnings == ()
        assert float((request.image - image).abs().max()) <= 2e-5
        assert numerics == "fast" or torch.equal(request.image, own.image)
    assert isinstance(cancelled.error, Cancelled)
    assert isinstance(failing.error, PipelineFailed)
    assert max(widths) >= 4
    assert sum(widths) / len(widths) > 1.6


def attend(query: Tensor, key: Any, value: Any, time: Any) -> Tensor:
    """What denoisers do with a cache, in all ways that they do it."""
    new = query.new_zeros(query.shape[0], 1, 4)
    key, value = torch.cat([key, new + 1], dim=1), torch.cat([value, new], dim=1)
    scale = torch.cat([time, time.new_zeros(1)])[:-1].view(query.shape[0], 1, 1)
    shift = torch.where(torch.ones(1, 3, 1) > 0, scale, time[-1:].unsqueeze(0))
    key = key.expand(query.shape[0], -1, -1)
    return F.scaled_dot_product_attention(query * (1 + shift), key, value)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 3, 2)])
def test_each_call_reads_its_own_part(rows: tuple[int, ...], is_exact: bool) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    generator = torch.Generator().manual_seed(1)
    queries = [draw(n, 3, 4) for n in rows]
    keys = [draw(n, 5 + place, 4) for place, n in enumerate(rows)]
    times = [draw(n) for n in rows]
    alone = [attend(*call) for call in zip(queries, keys, keys, times, strict=True)]
    query, mode = torch.cat(queries), Exact(rows)
    own = [PerCall(keys, rows), PerCall(keys, rows), PerCall(times, rows)]

    if is_exact:
        mode.mark(query, ROWS | DATA)
        with mode:
            together = attend(query, *own)
    else:
        together = attend(query, *own)

    assert type(together) is Tensor
    for part, reference in zip(torch.split(together, list(rows)), alone, strict=True):
        assert torch.equal(part, reference) if is_exact else torch.allclose(part, reference)


def test_what_a_forward_writes_goes_to_each_calls_own_object() -> None:
    caches = [
        SimpleNamespace(mode="extract", layers=[{"k": None, "old": torch.ones(n)}]) for n in (1, 2)
    ]
    before = [mapped(lambda tensors: tensors[0], [cache]) for cache in caches]
    together = mapped(lambda parts: PerCall(parts, (1, 2)), caches)
    together.layers[0]["k"] = torch.arange(3.0)

    give_back(together, caches, (1, 2))

    assert [cache.layers[0]["k"].tolist() for cache in caches] == [[0.0], [1.0, 2.0]]
    for cache, past in zip(caches, before, strict=True):
        assert cache.layers[0]["old"] is past.layers[0]["old"]
        assert past.layers[0]["k"] is None
    with pytest.raises(ValueError, match="calls of one forward differ"):
        PerCall([torch.zeros(1, 2), torch.zeros(1, 3)], (1, 1)).shape  # noqa: B018
