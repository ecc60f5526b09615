"""FLUX.1 Kontext, FLUX.2 and its smaller kin, Klein."""

from typing import Any

import numpy as np
from PIL import Image

from support.matrix.case import Case

CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"
_pixels = np.random.RandomState(0).randint(0, 255, (5, 64, 64, 3), np.uint8)
IMAGES = [Image.fromarray(pixels) for pixels in _pixels]
SMALL = [image.resize((32, 32)) for image in IMAGES]

GUIDED: tuple[dict[str, Any], ...] = (
    {"prompt": CAT, "seed": 1, "num_inference_steps": 4, "guidance_scale": 4.0},
    {"prompt": LONG, "seed": 2, "num_inference_steps": 6, "guidance_scale": 1.5},
    {"prompt": "", "seed": 3, "num_inference_steps": 3, "guidance_scale": 1.0},
    {"prompt": "a dog", "seed": 4, "num_inference_steps": 2},
)
PLAIN: tuple[dict[str, Any], ...] = (
    {"prompt": CAT, "seed": 1, "num_inference_steps": 4},
    {"prompt": LONG, "seed": 2, "num_inference_steps": 6},
    {"prompt": "", "seed": 3, "num_inference_steps": 3},
    {"prompt": "a dog", "seed": 4, "num_inference_steps": 2},
)
TEXT_TO_IMAGE = {"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.2}
EDIT = {**TEXT_TO_IMAGE, "vae.encode": 1.8}


def _with_images(
    requests: tuple[dict[str, Any], ...], images: list[Any]
) -> tuple[dict[str, Any], ...]:
    return tuple(one | {"image": image} for one, image in zip(requests, images, strict=False))


CASES = [
    Case(
        name="kontext-edit",
        family="kontext",
        task="edit",
        requests=_with_images(
            (
                GUIDED[0],
                GUIDED[1] | {"num_inference_steps": 7},
                GUIDED[2],
                GUIDED[3] | {"negative_prompt": "blurry", "true_cfg_scale": 3.0},
            ),
            SMALL,
        ),
        matters=("prompt", "seed", "guidance_scale", "image"),
        fuses={
            "text_encoder.forward": 2.0,
            "text_encoder_2.forward": 2.0,
            "vae.encode": 1.8,
            "transformer.forward": 1.9,
            "vae.decode": 1.2,
        },
    ),
    Case(
        name="flux2-t2i",
        family="flux2",
        task="text-to-image",
        requests=GUIDED,
        matters=("prompt", "seed", "guidance_scale"),
        fuses=TEXT_TO_IMAGE,
    ),
    Case(
        name="flux2-edit",
        family="flux2",
        task="edit",
        requests=_with_images(GUIDED, IMAGES),
        matters=("prompt", "seed", "guidance_scale", "image"),
        fuses=EDIT,
    ),
    Case(
        name="flux2-edit-two",
        family="flux2",
        task="edit",
        requests=_with_images(GUIDED, [IMAGES[i : i + 2] for i in range(4)]),
        matters=("prompt", "seed", "guidance_scale", "image"),
        fuses=EDIT,
    ),
    Case(
        name="flux2-klein-base-t2i",
        family="flux2_klein_base",
        task="text-to-image",
        requests=GUIDED,
        matters=("prompt", "seed", "guidance_scale"),
        fuses=TEXT_TO_IMAGE,
    ),
    Case(
        name="flux2-klein-base-edit",
        family="flux2_klein_base",
        task="edit",
        requests=_with_images(GUIDED, IMAGES),
        matters=("prompt", "seed", "guidance_scale", "image"),
        fuses=EDIT,
    ),
    Case(
        name="flux2-klein-t2i",
        family="flux2_klein",
        task="text-to-image",
        requests=PLAIN,
        fuses=TEXT_TO_IMAGE,
    ),
    Case(
        name="flux2-klein-edit",
        family="flux2_klein",
        task="edit",
        requests=_with_images(PLAIN, IMAGES),
        matters=("prompt", "seed", "image"),
        fuses=EDIT,
    ),
    Case(
        name="flux2-klein-kv-edit",
        is_fast=True,
        family="flux2_klein_kv",
        task="edit",
        requests=_with_images(PLAIN, IMAGES),
        matters=("prompt", "seed", "image"),
        fuses={"text_encoder.forward": 2.5, "vae.encode": 2.5, "vae.decode": 1.2},
        alone=("transformer.forward",),  # keys and values of the pictures belong to one request
    ),
]
