"""Z-Image and Z-Image Turbo: the one family whose sizes share a forward."""

from support.matrix.case import Case

CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"
WIDE = {"height": 32, "width": 64}
GUIDED = (
    {
        "prompt": CAT, "seed": 1, "num_inference_steps": 4, "guidance_scale": 4.0,
        "negative_prompt": "blurry",
    },
    {
        "prompt": LONG, "seed": 2, "num_inference_steps": 6, "guidance_scale": 2.0,
        "negative_prompt": "a red balloon, bad quality",
    },
)  # fmt: skip

CASES = [
    Case(
        name="zimage-t2i", family="zimage", task="text-to-image",
        requests=(
            *GUIDED,
            {"prompt": "a dog", "seed": 3, "num_inference_steps": 3, "guidance_scale": 0.0, **WIDE},
            {"prompt": LONG, "seed": 4, "num_inference_steps": 2, "cfg_truncation": 0.5, **WIDE},
        ),
        matters=("prompt", "seed", "guidance_scale", "negative_prompt"),
        fuses={"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.2},
        is_fast=True,
    ),
    Case(
        name="zimage-turbo-t2i", family="zimage", task="text-to-image",
        common={"guidance_scale": 0.0},
        requests=(
            {"prompt": CAT, "seed": 1, "num_inference_steps": 4},
            {"prompt": LONG, "seed": 2, "num_inference_steps": 6},
            {"prompt": "", "seed": 3, "num_inference_steps": 3, **WIDE},
            {"prompt": "a dog", "seed": 4, "num_inference_steps": 2, **WIDE},
        ),
        fuses={"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.2},
    ),
]  # fmt: skip
