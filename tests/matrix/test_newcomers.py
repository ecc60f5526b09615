"""Pipelines made of others' parts: six at once, then the pipeline is compared with a fresh one."""

import inspect
from typing import Any, Literal

import pytest
import torch
from diffusers import DiffusionPipeline

from support import torchvision_cpu
from support.engine_driver import called, driving, for_inference, gap
from support.isolation import build, differences, state_of
from support.newcomers import NEWCOMERS, asked
from support.tiny import newest
from support.tiny.newest import NEEDS_TORCHVISION

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")

FAST = {
    "MarigoldDepthPipeline", "FluxKontextInpaintPipeline", "StableDiffusion3PAGPipeline",
    "HunyuanImagePipeline", "StableDiffusionPipeline",
}  # fmt: skip
WITHOUT = set() if torchvision_cpu.IS_THERE else NEEDS_TORCHVISION
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "a cat", "num_inference_steps": 3},
    {
        **{"prompt": "a dog", "num_inference_steps": 4, "guidance_scale": 3.5},
        **{"controlnet_conditioning_scale": 0.5, "pag_scale": 0.0},
    },
    {"prompt": "a cat", "num_inference_steps": 3, "guidance_scale": 1.0},
    {"prompt": "the sea", "num_inference_steps": 2, "negative_prompt": None, "output_type": "np"},
)


def plain(pipe: DiffusionPipeline, seed: int, arguments: dict[str, Any]) -> torch.Tensor:
    output = called(for_inference(pipe), seed, **arguments)
    return torch.as_tensor(next(iter(output.values())))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow])
        for n in NEWCOMERS
        if n not in WITHOUT
    ],
)
def test_six_at_once_get_what_each_gets_alone_and_the_pipeline_comes_back(name: str) -> None:
    make, _ = NEWCOMERS[name]
    requests = asked(name, REQUESTS)
    pipe, before = build(make), state_of(build(make))
    assert type(pipe).__name__ == name

    def fail(*_: Any) -> dict[str, Any]:
        raise ValueError("on purpose")

    failure: dict[str, Any] = {"num_inference_steps": -1}
    for way in ("callback_on_step_end", "callback"):
        if way in inspect.signature(type(pipe).__call__).parameters:
            failure = {way: fail}
    numerics: Literal["exact", "fast"] = "exact" if name in newest.DATA else "fast"
    with driving(pipe, numerics=numerics) as drive:
        cancelled = drive.submit(**{"prompt": None, **requests[0]}, seed=90, request_id="cancelled")
        heard = []
        for seed, one in enumerate(requests):
            heard.append(drive.submit(**{"prompt": None, **one}, seed=seed))
        failing = None
        if "num_inference_steps" not in failure:
            failing = drive.submit(**{"prompt": None, **requests[0], **failure}, seed=91)
        is_counted = hasattr(pipe, "scheduler")
        drive.turn_until(
            lambda: cancelled.step >= 1 or (not is_counted and len(drive.forwards) > 5)
        )
        drive.engine.cancel("cancelled")
        drive.finish()

    assert cancelled.error is not None
    assert failing is None or failing.error is not None
    for seed, (one, recorder) in enumerate(zip(requests, heard, strict=True)):
        assert recorder.error is None
        expected = plain(build(make), seed, one)
        got = torch.as_tensor(next(iter(recorder.outcome.fields.values())))
        got = got.reshape(expected.shape)  # a video alone becomes a batch
        assert gap(got, expected) <= (0 if numerics == "exact" else 5e-5)
    assert differences(before, state_of(pipe)) == []
