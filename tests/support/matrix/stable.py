"""FLUX.1, Stable Diffusion 3, XL and 1.5: from text, from pictures, and inpainting."""

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
from diffusers import DiffusionPipeline
from PIL import Image

from support.matrix.case import Case

CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"

_RANDOM = np.random.RandomState(0)
PICTURES = [Image.fromarray(_RANDOM.randint(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(4)]
MASKS = [
    Image.fromarray(np.kron(_RANDOM.randint(0, 2, (4, 4)), np.full((16, 16), 255)).astype(np.uint8))
    for _ in range(4)
]
"""Each square of 16x16 pixels is repainted (white) or kept."""

GUIDED = (
    {
        "prompt": CAT,
        "seed": 1,
        "num_inference_steps": 5,
        "guidance_scale": 7.5,
        "negative_prompt": "blurry",
    },
    {
        "prompt": LONG,
        "seed": 2,
        "num_inference_steps": 5,
        "guidance_scale": 3.0,
        "negative_prompt": "a red balloon, bad quality",
    },
    {"prompt": "", "seed": 3, "num_inference_steps": 3, "guidance_scale": 1.0},
    {"prompt": "a dog", "seed": 4, "num_inference_steps": 2},
)
EMBEDDED = (  # of FLUX: its guidance is an argument of the model
    {"prompt": CAT, "seed": 1, "num_inference_steps": 5, "guidance_scale": 3.5},
    {"prompt": LONG, "seed": 2, "num_inference_steps": 5, "guidance_scale": 1.5},
    {"prompt": "", "seed": 3, "num_inference_steps": 3},
    {
        "prompt": "a dog",
        "seed": 4,
        "num_inference_steps": 2,
        "negative_prompt": "blurry",
        "true_cfg_scale": 3.0,
    },
)


def from_pictures(requests: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Each request starts from a picture of its own, and makes as many steps as before."""
    strengths = (0.625, 0.5, 0.75, 1.0)
    return tuple(
        {
            **one,
            "image": picture,
            "strength": strength,
            "num_inference_steps": int(one["num_inference_steps"] / strength),
        }
        for one, picture, strength in zip(requests, PICTURES, strengths, strict=True)
    )


def inpainting(requests: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The same, with a mask each."""
    return tuple(
        {**one, "mask_image": mask}
        for one, mask in zip(from_pictures(requests), MASKS, strict=True)
    )


def to(name: str) -> Callable[[DiffusionPipeline], DiffusionPipeline]:
    """A pipeline of this class over the same components."""
    return lambda pipe: getattr(diffusers, name).from_pipe(pipe)


def _ancestral(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """With a scheduler that draws noise at every step."""
    scheduler = diffusers.EulerAncestralDiscreteScheduler
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    return pipe


_FLUX = {
    "text_encoder.forward": 2.2,
    "text_encoder_2.forward": 2.2,
    "transformer.forward": 1.8,
    "vae.decode": 1.2,
}
_SD3 = {
    "text_encoder.forward": 2.5,
    "text_encoder_2.forward": 2.5,
    "text_encoder_3.forward": 2.5,
    "transformer.forward": 1.7,
    "vae.decode": 1.2,
}
_SDXL = {
    "text_encoder.forward": 3.0,
    "text_encoder_2.forward": 3.0,
    "unet.forward": 2.4,
    "vae.decode": 1.8,
}
_SD15 = {"text_encoder.forward": 2.5, "unet.forward": 2.6, "vae.decode": 1.8}
_ENCODES = {"vae.encode": 1.8}
_SHOWS = ("prompt", "seed", "guidance_scale")

CASES = [
    Case(
        name="flux-t2i",
        family="flux",
        task="text-to-image",
        requests=EMBEDDED,
        matters=_SHOWS,
        fuses=_FLUX,
        is_fast=True,
    ),
    Case(
        name="flux-i2i",
        family="flux",
        task="image-to-image",
        requests=from_pictures(EMBEDDED),
        matters=(*_SHOWS, "image", "strength"),
        fuses={**_FLUX, **_ENCODES},
        adapt=to("FluxImg2ImgPipeline"),
    ),
    Case(
        name="flux-inpaint",
        family="flux",
        task="inpaint",
        requests=inpainting(EMBEDDED),
        matters=(*_SHOWS, "image", "strength", "mask_image"),
        fuses={**_FLUX, **_ENCODES},
        adapt=to("FluxInpaintPipeline"),
    ),
    Case(
        name="sd3-t2i",
        family="sd3",
        task="text-to-image",
        requests=GUIDED,
        matters=(*_SHOWS, "negative_prompt"),
        fuses=_SD3,
        is_fast=True,
    ),
    Case(
        name="sd3-i2i",
        family="sd3",
        task="image-to-image",
        requests=from_pictures(GUIDED),
        matters=(*_SHOWS, "negative_prompt", "image", "strength"),
        fuses={**_SD3, **_ENCODES},
        adapt=to("StableDiffusion3Img2ImgPipeline"),
    ),
    Case(
        name="sd3-inpaint",
        family="sd3_inpaint",
        task="inpaint",
        requests=inpainting(GUIDED),
        matters=(*_SHOWS, "negative_prompt", "image", "strength", "mask_image"),
        fuses={**_SD3, **_ENCODES},
    ),
    Case(
        name="sdxl-t2i",
        family="sdxl",
        task="text-to-image",
        requests=GUIDED,
        matters=(*_SHOWS, "negative_prompt"),
        fuses=_SDXL,
        is_fast=True,
    ),
    Case(
        name="sdxl-t2i-ancestral",
        family="sdxl",
        task="text-to-image",
        requests=GUIDED,
        matters=(*_SHOWS, "negative_prompt"),
        fuses=_SDXL,
        adapt=_ancestral,
    ),
    Case(
        name="sdxl-i2i",
        family="sdxl",
        task="image-to-image",
        requests=from_pictures(GUIDED),
        without=("height", "width"),
        matters=(*_SHOWS, "negative_prompt", "image", "strength"),
        fuses={**_SDXL, **_ENCODES},
        adapt=to("StableDiffusionXLImg2ImgPipeline"),
    ),
    Case(
        name="sdxl-inpaint",
        family="sdxl",
        task="inpaint",
        requests=inpainting(GUIDED),
        matters=(*_SHOWS, "negative_prompt", "image", "strength", "mask_image"),
        fuses={**_SDXL, **_ENCODES},
        adapt=to("StableDiffusionXLInpaintPipeline"),
    ),
    Case(
        name="sd15-t2i",
        family="sd15",
        task="text-to-image",
        requests=GUIDED,
        matters=(*_SHOWS, "negative_prompt"),
        fuses=_SD15,
    ),
    Case(
        name="sd15-i2i",
        family="sd15",
        task="image-to-image",
        requests=from_pictures(GUIDED),
        without=("height", "width"),
        matters=(*_SHOWS, "negative_prompt", "image", "strength"),
        fuses={**_SD15, **_ENCODES},
        adapt=to("StableDiffusionImg2ImgPipeline"),
    ),
    Case(
        name="sd15-inpaint",
        family="sd15",
        task="inpaint",
        requests=inpainting(GUIDED),
        matters=(*_SHOWS, "negative_prompt", "image", "strength", "mask_image"),
        fuses={**_SD15, **_ENCODES},
        adapt=to("StableDiffusionInpaintPipeline"),
    ),
]
