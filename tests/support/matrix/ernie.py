"""ERNIE-Image and ERNIE-Image Turbo."""

from support.matrix.case import Case
from support.matrix.zimage import CAT, GUIDED, LONG

CASES = [
    Case(
        name="ernie-t2i", family="ernie", task="text-to-image",
        requests=(
            *GUIDED,
            {"prompt": "a dog", "seed": 3, "num_inference_steps": 3, "guidance_scale": 1.0},
            {"prompt": LONG, "seed": 4, "num_inference_steps": 2},
        ),
        matters=("prompt", "seed", "guidance_scale", "negative_prompt"),
        fuses={"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.5},
        is_fast=True,
    ),
    Case(
        name="ernie-turbo-t2i", family="ernie", task="text-to-image",
        common={"guidance_scale": 1.0},
        requests=(
            {"prompt": CAT, "seed": 1, "num_inference_steps": 4},
            {"prompt": LONG, "seed": 2, "num_inference_steps": 6},
            {"prompt": "", "seed": 3, "num_inference_steps": 3},
            {"prompt": "a dog", "seed": 4, "num_inference_steps": 2},
        ),
        fuses={"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.5},
    ),
]  # fmt: skip
