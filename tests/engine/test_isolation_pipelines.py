"""Pipelines within pipelines, and perturbed attention: who shares what."""

from typing import Any

import torch
from diffusers import DiffusionPipeline

from carpool.types import Event
from support import isolation
from support.engine_driver import driving, gap
from support.isolation import ARGUMENTS, build
from support.tiny import tiny_pipeline


class Nested(DiffusionPipeline):  # type: ignore[misc]
    """A pipeline that calls another one, as Kandinsky 2.2 does."""

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    def __call__(
        self,
        prompt: str,
        num_inference_steps: int = 3,
        guidance_scale: float = 4.0,
        generator: Any = None,
        output_type: str = "pt",
    ) -> Any:
        return self.inner(
            prompt, height=64, width=64, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, generator=generator, output_type=output_type,
        )  # fmt: skip


def nested() -> Nested:
    inner = tiny_pipeline("sd15")
    pipe = Nested(inner.unet, inner.scheduler)
    pipe.inner = inner
    return pipe


def test_a_pipeline_inside_of_a_pipeline_is_the_requests_own_too() -> None:
    requests = [{"num_inference_steps": n, "guidance_scale": g} for n, g in ((3, 4.0), (5, 1.0))]
    pipe, judge = build(nested), build(nested)
    judge.inner.set_progress_bar_config(disable=True)

    with driving(pipe) as drive:
        heard = [drive.submit("a cat", seed=seed, **one) for seed, one in enumerate(requests)]
        drive.finish()

    for seed, (one, recorder) in enumerate(zip(requests, heard, strict=True)):
        expected = judge("a cat", generator=torch.Generator().manual_seed(seed), **one).images
        assert gap(recorder.image, expected) < 2e-5
    assert drive.widest("inner.text_encoder") == 2
    assert drive.widest("unet") == 2
    assert pipe.scheduler is pipe.inner.scheduler


def test_a_request_that_perturbs_attention_runs_alone_and_the_others_still_fuse() -> None:
    pipe = build(isolation.pag_sd3)
    with driving(pipe) as drive:
        perturbed = drive.submit(**ARGUMENTS["pag_sd3"], pag_scale=3.0)
        plain = [drive.submit(**ARGUMENTS["pag_sd3"], pag_scale=0.0, seed=s) for s in (1, 2)]
        drive.finish()
        lives = [
            drive.engine.timeline(one.outcome.request.request_id) or {}
            for one in (perturbed, *plain)
        ]

    assert [life["exclusive"] for life in lives] == [sorted(drive.engine.loaded.modules), [], []]
    assert drive.widest("transformer") == 2
    assert drive.widest("text_encoder_3") == 3
    assert isinstance(perturbed.events[0], Event)
