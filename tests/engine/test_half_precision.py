"""Pipelines in half precision, and VAEs that overflow in it: what plain diffusers gives."""

import inspect
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torch import nn

import carpool
from carpool.config import EngineSettings
from carpool.engine.model.load import load
from support.engine_driver import driving, fresh, gap
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.filterwarnings(  # diffusers' Euler scheduler with numpy 2
    "ignore:__array__ implementation:DeprecationWarning"
)


def test_a_vae_that_overflows_in_float16_stays_in_float32_until_the_end() -> None:
    pipe = half("sdxl")
    loaded = load(pipe, EngineSettings(device="cpu"))

    assert loaded.pipe.unet.dtype == torch.float16
    assert loaded.pipe.vae.dtype == torch.float32
    assert loaded.pipe.vae.config.force_upcast is True
    loaded.undo()
    assert pipe.vae.dtype == torch.float16
    assert type(pipe.vae) is diffusers.AutoencoderKL


def half(family: str, cls: type[diffusers.DiffusionPipeline] | None = None) -> Any:
    pipe = fresh(family)
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    if cls is not None:
        pipe = cls(**{name: one for name, one in parts.items() if name != "safety_checker"})
    if "force_upcast" in pipe.vae.config:
        pipe.vae.register_to_config(force_upcast=True)
    for part in parts.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.float16)


class OwnWay(diffusers.StableDiffusionXLPipeline):  # type: ignore[misc]
    """Knows of force_upcast, and yet decodes in float16 once, and asks for types in between."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **{**kwargs, "output_type": "latent"})
        latents = out.images / self.vae.config.scaling_factor
        coarse = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0]
        self.vae.float()
        fine = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0]
        types = float(self.vae.dtype == torch.float32), float(fine.dtype == torch.float32)
        self.vae.half()
        coarse = coarse + self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0]
        out.images = torch.cat([coarse.float(), fine]) + types[0] + 2 * types[1]
        return out


OwnWay.__call__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    diffusers.StableDiffusionXLPipeline.__call__
)


PIPELINES: dict[str, tuple[str, type[diffusers.DiffusionPipeline] | None]] = {
    "sdxl": ("sdxl", None),
    "sd15": ("sd15", None),
    "image to image": ("sdxl", diffusers.StableDiffusionXLImg2ImgPipeline),
    "a way of its own": ("sdxl", OwnWay),
}


@cache
def plain_pictures(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Arguments for a pipeline, and what plain diffusers draws with them for seeds 0, 1 and 2."""
    family, cls = PIPELINES[name]
    arguments = {**ARGUMENTS[family], "num_inference_steps": 4}
    if name == "image to image":
        del arguments["height"], arguments["width"]
        arguments["num_inference_steps"], arguments["strength"] = 6, 0.9
        arguments["image"] = Image.effect_noise((64, 64), 80).convert("RGB")
    expected = []
    for seed in range(3):
        given = torch.Generator().manual_seed(seed)
        expected.append(half(family, cls)("a cat", **arguments, generator=given).images)
    return arguments, expected


@pytest.mark.parametrize("isolation", ["auto", "private"])
@pytest.mark.parametrize("name", PIPELINES)
def test_requests_in_float16_get_what_plain_diffusers_gives(name: str, isolation: Any) -> None:
    arguments, expected = plain_pictures(name)

    def fail(*_: Any) -> dict[str, Any]:
        raise ValueError("on purpose")

    pipe = half(*PIPELINES[name])
    with driving(pipe, numerics="exact", isolation=isolation) as drive:
        heard = [drive.submit("a cat", seed=seed, **arguments) for seed in range(3)]
        failing = drive.submit("a cat", **arguments, callback_on_step_end=fail)
        cancelled = drive.submit("a cat", **arguments, request_id="cancelled")
        drive.turn(4)
        drive.engine.cancel("cancelled")
        drive.finish()

    assert failing.error is not None
    assert cancelled.error is not None
    for one, picture in zip(heard, expected, strict=True):
        assert gap(one.image, picture) == 0.0
    assert {weight.dtype for weight in pipe.vae.parameters()} == {torch.float16}
    if isolation == "auto" and name != "a way of its own":
        assert drive.widest("unet") > 1


def test_requests_in_half_precision_get_float32_pictures_together_as_alone() -> None:
    with carpool.load(checkpoint("sdxl"), device="cpu", dtype="float16") as engine:
        together = engine.generate(["a cat", "a dog"], seed=1, **ARGUMENTS["sdxl"])
        alone = [engine.generate(p, seed=1, **ARGUMENTS["sdxl"])[0] for p in ("a cat", "a dog")]

    for one, other in zip(together, alone, strict=True):
        drawn: Any = one.images
        assert drawn.dtype == torch.float32
        assert gap(drawn, other.images) < 0.02  # float16 rounds by company
