"""Wan 2.1 and 2.2."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from diffusers import DiffusionPipeline
from PIL import Image

from support.matrix.case import Case

CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"
_patches = np.random.RandomState(0).randint(0, 255, (4, 2, 3, 3), np.uint8)
IMAGES = [Image.fromarray(one.repeat(16, 0).repeat(16, 1)) for one in _patches]  # 48 x 32


def without_ftfy(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Some pipelines call ftfy even where it is not installed: here it leaves prompts alone."""
    module: Any = sys.modules[type(pipe).__module__]
    if not hasattr(module, "ftfy"):
        module.ftfy = SimpleNamespace(fix_text=str)
    return pipe


def image_to_video(pipe: DiffusionPipeline) -> DiffusionPipeline:
    from diffusers import WanImageToVideoPipeline

    parts = {name: part for name, part in pipe.components.items() if part is not None}
    return without_ftfy(WanImageToVideoPipeline(**parts, expand_timesteps=True))


FIRST: dict[str, Any] = {
    "prompt": CAT, "negative_prompt": "blurry", "seed": 1, "num_inference_steps": 4,
    "guidance_scale": 5.0,
}  # fmt: skip
SECOND: dict[str, Any] = {
    "prompt": LONG, "negative_prompt": "a red balloon", "seed": 2, "num_inference_steps": 6,
    "guidance_scale": 2.0,
}  # fmt: skip
THIRD: dict[str, Any] = {"prompt": "", "seed": 3, "num_inference_steps": 3, "guidance_scale": 1.0}
FOURTH: dict[str, Any] = {"prompt": "the moon", "seed": 4, "num_inference_steps": 2}
MATTERS = ("prompt", "negative_prompt", "seed", "guidance_scale")


def with_images(*requests: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple(one | {"image": image} for one, image in zip(requests, IMAGES, strict=True))


CASES = [
    Case(
        name="wan21-t2v", family="wan21_t2v", task="text-to-video",
        requests=(FIRST, SECOND, THIRD, FOURTH), matters=MATTERS,
        fuses={"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.2},
    ),
    Case(
        name="wan22-t2v-a14b", family="wan22_t2v_a14b", task="text-to-video",
        requests=(
            FIRST | {"guidance_scale_2": 3.0}, SECOND | {"guidance_scale_2": 6.0}, THIRD, FOURTH,
        ),
        matters=(*MATTERS, "guidance_scale_2"),
        fuses={
            "text_encoder.forward": 2.5, "transformer.forward": 2.5, "transformer_2.forward": 1.8,
            "vae.decode": 1.2,
        },
    ),
    Case(
        name="wan22-ti2v-5b-t2v", family="wan22_ti2v_5b", task="text-to-video",
        requests=(FIRST, SECOND, THIRD, FOURTH), matters=MATTERS,
        fuses={"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.2},
    ),
    Case(
        name="wan22-ti2v-5b-i2v", family="wan22_ti2v_5b", task="image-to-video",
        adapt=image_to_video, requests=with_images(FIRST, SECOND, THIRD, FOURTH),
        matters=(*MATTERS, "image"),
        fuses={
            "text_encoder.forward": 2.5, "vae.encode": 1.8, "transformer.forward": 2.5,
            "vae.decode": 1.2,
        },
    ),
    Case(
        name="wan21-i2v", is_fast=True, family="wan21_i2v", adapt=without_ftfy,
        task="image-to-video", requests=with_images(FIRST, SECOND, THIRD, FOURTH),
        matters=(*MATTERS, "image"),
        fuses={
            "text_encoder.forward": 2.5, "image_encoder.forward": 1.8, "vae.encode": 1.8,
            "transformer.forward": 2.5, "vae.decode": 1.2,
        },
    ),
    Case(
        name="wan22-i2v-a14b", family="wan22_i2v_a14b", adapt=without_ftfy, task="image-to-video",
        requests=with_images(
            FIRST | {"guidance_scale_2": 3.0}, SECOND | {"guidance_scale_2": 6.0},
            THIRD | {"last_image": IMAGES[0]}, FOURTH | {"num_inference_steps": 3},
        ),
        matters=(*MATTERS, "guidance_scale_2", "image"),
        fuses={
            "text_encoder.forward": 2.5, "vae.encode": 1.8, "transformer.forward": 2.2,
            "transformer_2.forward": 1.8, "vae.decode": 1.5,
        },
    ),
]  # fmt: skip
