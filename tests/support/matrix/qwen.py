"""Qwen-Image, and its kin that edit pictures or take them apart."""

import functools
import importlib
from typing import Any

import numpy as np
from PIL import Image

from support.matrix.case import Case
from support.matrix.stable import to

CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"
_pixels = np.random.RandomState(0).randint(0, 255, (5, 64, 64, 4), np.uint8)
IMAGES = [Image.fromarray(pixels[..., :3]) for pixels in _pixels]
CLEAR = [Image.fromarray(pixels) for pixels in _pixels]  # RGBA
MASKS = [Image.fromarray(pixels[..., 3]) for pixels in _pixels]

REQUESTS: tuple[dict[str, Any], ...] = (
    {
        "prompt": CAT, "negative_prompt": "blurry", "seed": 1, "num_inference_steps": 4,
        "true_cfg_scale": 4.0,
    },
    {
        "prompt": LONG, "negative_prompt": "a red balloon in the sky", "seed": 2,
        "num_inference_steps": 6, "true_cfg_scale": 2.0,
    },
    {"prompt": "the sky", "seed": 3, "num_inference_steps": 3},
    {"prompt": "a dog", "negative_prompt": "bad", "seed": 4, "num_inference_steps": 2},
)  # fmt: skip
MATTERS = ("prompt", "negative_prompt", "seed", "true_cfg_scale")
TEXT_TO_IMAGE = {"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.2}
EDIT = {**TEXT_TO_IMAGE, "vae.encode": 1.8}


def _with(name: str, values: list[Any], requests: Any = REQUESTS) -> tuple[dict[str, Any], ...]:
    return tuple(one | {name: value} for one, value in zip(requests, values, strict=False))


def shrunk(pipe: Any, place: str = "") -> Any:
    """Have references brought to 64x64 px, not a megapixel, in plain diffusers and in engines."""
    module: Any = importlib.import_module(place or type(pipe).__module__)
    full = getattr(module.calculate_dimensions, "__wrapped__", module.calculate_dimensions)

    @functools.wraps(full)
    def calculate_dimensions(target_area: int, ratio: float) -> Any:
        return full(target_area / 256, ratio)

    module.calculate_dimensions = calculate_dimensions
    return pipe


CASES = [
    Case(
        name="qwen-image-21-t2i",
        family="qwen_21",
        task="text-to-image",
        requests=REQUESTS,
        matters=MATTERS,
        fuses={"transformer.forward": 1.8, "vae.decode": 1.0},
        alone=("text_encoder.forward",),  # the pipeline hooks it around the call
    ),
    Case(
        name="qwen-image-21-edit",
        family="qwen_21",
        task="edit",
        common={"output_resolution": 64},
        requests=_with("image", IMAGES),
        matters=(*MATTERS, "image"),
        fuses={"transformer.forward": 1.8, "vae.encode": 1.0, "vae.decode": 1.0},
        alone=("text_encoder.forward",),  # the pipeline hooks it around the call
    ),
    Case(
        name="qwen-image-t2i",
        family="qwen_image",
        task="text-to-image",
        requests=REQUESTS,
        matters=MATTERS,
        fuses=TEXT_TO_IMAGE,
    ),
    Case(
        name="qwen-image-i2i",
        family="qwen_image",
        task="image-to-image",
        adapt=to("QwenImageImg2ImgPipeline"),
        requests=_with("image", IMAGES, _with("strength", [0.6, 0.5, 0.6, 1.0])),
        matters=(*MATTERS, "image", "strength"),
        fuses=EDIT,
    ),
    Case(
        name="qwen-image-inpaint",
        family="qwen_image",
        task="inpaint",
        adapt=to("QwenImageInpaintPipeline"),
        requests=_with("image", IMAGES, _with("mask_image", MASKS)),
        matters=(*MATTERS, "image", "mask_image"),
        common={"strength": 1.0},
        fuses=EDIT,
    ),
    Case(
        name="qwen-image-edit",
        family="qwen_edit",
        task="edit",
        adapt=shrunk,
        requests=_with("image", IMAGES),
        matters=(*MATTERS, "image"),
        fuses=EDIT,
    ),
    Case(
        name="qwen-image-edit-plus",
        family="qwen_edit_plus",
        task="edit",
        adapt=shrunk,
        requests=_with("image", [[image] for image in IMAGES]),
        matters=(*MATTERS, "image"),
        fuses=EDIT,
    ),
    Case(
        name="qwen-image-edit-plus-two",
        family="qwen_edit_plus",
        task="edit",
        adapt=shrunk,
        requests=_with("image", [IMAGES[i : i + 2] for i in range(4)]),
        matters=(*MATTERS, "image"),
        fuses=EDIT,
    ),
    Case(
        name="qwen-image-layered",
        family="qwen_layered",
        task="edit",
        adapt=shrunk,
        requests=_with("image", CLEAR, (*REQUESTS[:2], REQUESTS[2] | {"prompt": ""}, REQUESTS[3])),
        matters=(*MATTERS, "image"),
        # one request writes its prompt first, and draws after the others
        fuses=EDIT | {"text_encoder.forward": 2.0, "transformer.forward": 2.0, "vae.decode": 1.0},
        alone=(
            "text_encoder.generate",
            "text_encoder.tower.forward",
        ),  # a caption, where there is no prompt
    ),
]
