"""A pipeline within a pipeline: who shares what."""

from typing import Any

import torch
from diffusers import DiffusionPipeline

from support.engine_driver import driving, gap
from support.isolation import build
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
