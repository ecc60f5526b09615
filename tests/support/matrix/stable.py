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
    {"prompt": CAT, "seed": 1, "num_inference_steps": 5, "guidance_scale": 7.5,
     "negative_prompt": "blurry"},
    {"prompt": LONG, "seed": 2, "num_inference_steps": 5, "guidance_scale": 3.0,
     "negative_prompt": "a red balloon, bad quality"},
    {"prompt": "", "seed": 3, "num_inference_steps": 3, "guidance_scale": 1.0},
    {"prompt": "a dog", "seed": 4, "num_inference_steps": 2},
)  # fmt: skip
EMBEDDED = (  # of FLUX: its guidance is an argument of the model
    {"prompt": CAT, "seed": 1, "num_inference_steps": 5, "guidance_scale": 3.5},
    {"prompt": LONG, "seed": 2, "num_inference_steps": 5, "guidance_scale": 1.5},
    {"prompt": "", "seed": 3, "num_inference_steps": 3},
    {"prompt": "a dog", "seed": 4, "num_inference_steps": 2, "negative_prompt": "blurry",
     "true_cfg_scale": 3.0},
)  # fmt: skip


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


_FLUX = {"text_encoder.forward": 2.2, "text_encoder_2.forward": 2.2,
         "transformer.forward": 1.8, "vae.decode": 1.2}  # fmt: skip
_SD3 = {"text_encoder.forward": 2.5, "text_encoder_2.forward": 2.5, "text_encoder_3.forward": 2.5,
        "transformer.forward": 1.7, "vae.decode": 1.2}  # fmt: skip
_SDXL = {"text_encoder.forward": 3.0, "text_encoder_2.forward": 3.0,
         "unet.forward": 2.4, "vae.decode": 1.8}  # fmt: skip
_SD15 = {"text_encoder.forward": 2.5, "unet.forward": 2.6, "vae.decode": 1.8}
_ENCODES = {"vae.encode": 1.8}
_SHOWS = ("prompt", "seed", "guidance_scale")

_PICTURE = ("image", "strength")
_FROM_PICTURES = {"without": ("height", "width")}  # they have the picture's size


def _case(name: str, requests: Any, fuses: dict[str, float], cls: str = "", **rest: Any) -> Case:
    """A case of a family from text, from pictures (`-i2i`) or inpainting, by its name."""
    family, _, kind = name.partition("-")
    guides = _SHOWS if requests is EMBEDDED else (*_SHOWS, "negative_prompt")
    own: dict[str, Any] = {"task": "text-to-image", "matters": guides, "fuses": fuses}
    if kind in ("i2i", "inpaint"):
        own = {"task": "image-to-image", "matters": (*guides, *_PICTURE)}
        own["fuses"] = {**fuses, **_ENCODES}
        requests = (from_pictures if kind == "i2i" else inpainting)(requests)
    if kind == "inpaint":
        own |= {"task": "inpaint", "matters": (*own["matters"], "mask_image")}
    own |= {"family": family, "requests": requests, "adapt": to(cls) if cls else None}
    return Case(name=name, **(own | rest))


CASES = [
    _case("flux-t2i", EMBEDDED, _FLUX, is_fast=True),
    _case("flux-i2i", EMBEDDED, _FLUX, "FluxImg2ImgPipeline"),
    _case("flux-inpaint", EMBEDDED, _FLUX, "FluxInpaintPipeline"),
    _case("sd3-t2i", GUIDED, _SD3, is_fast=True),
    _case("sd3-i2i", GUIDED, _SD3, "StableDiffusion3Img2ImgPipeline"),
    _case("sd3-inpaint", GUIDED, _SD3, family="sd3_inpaint"),
    _case("sdxl-t2i", GUIDED, _SDXL, is_fast=True),
    _case("sdxl-t2i-ancestral", GUIDED, _SDXL, adapt=_ancestral),
    _case("sdxl-i2i", GUIDED, _SDXL, "StableDiffusionXLImg2ImgPipeline", **_FROM_PICTURES),
    _case("sdxl-inpaint", GUIDED, _SDXL, "StableDiffusionXLInpaintPipeline"),
    _case("sd15-t2i", GUIDED, _SD15, is_fast=True),
    _case(
        "sd15-i2i", GUIDED, _SD15, "StableDiffusionImg2ImgPipeline", is_fast=True, **_FROM_PICTURES
    ),
    _case("sd15-inpaint", GUIDED, _SD15, "StableDiffusionInpaintPipeline"),
]
