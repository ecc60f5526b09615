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


def _case(
    name: str, requests: tuple[dict[str, Any], ...], images: list[Any] | None = None, **rest: Any
) -> Case:
    """A case of `FAMILY-t2i`, or with pictures of `FAMILY-edit`."""
    matters = ("prompt", "seed", *(["guidance_scale"] if requests is GUIDED else []))
    own: dict[str, Any] = {"family": name.rpartition("-")[0].replace("-", "_"), "matters": matters}
    own |= {"task": "text-to-image", "requests": requests, "fuses": TEXT_TO_IMAGE}
    if images is not None:
        own |= {"task": "edit", "requests": _with_images(requests, images), "fuses": EDIT}
        own["matters"] = (*matters, "image")
    return Case(name=name, **(own | rest))


CASES = [
    Case(
        name="kontext-edit", family="kontext", task="edit",
        requests=_with_images(
            (
                GUIDED[0], GUIDED[1] | {"num_inference_steps": 7}, GUIDED[2],
                GUIDED[3] | {"negative_prompt": "blurry", "true_cfg_scale": 3.0},
            ),
            SMALL,
        ),
        matters=("prompt", "seed", "guidance_scale", "image"),
        fuses={
            "text_encoder.forward": 2.0, "text_encoder_2.forward": 2.0, "vae.encode": 1.8,
            "transformer.forward": 1.9, "vae.decode": 1.2,
        },
    ),
    _case("flux2-t2i", GUIDED), _case("flux2-edit", GUIDED, IMAGES),
    _case("flux2-edit-two", GUIDED, [IMAGES[i : i + 2] for i in range(4)], family="flux2"),
    _case("flux2-klein-base-t2i", GUIDED), _case("flux2-klein-base-edit", GUIDED, IMAGES),
    _case("flux2-klein-t2i", PLAIN), _case("flux2-klein-edit", PLAIN, IMAGES),
    _case("flux2-klein-kv-edit", PLAIN, IMAGES, is_fast=True),
]  # fmt: skip
