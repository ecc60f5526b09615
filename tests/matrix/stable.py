"""FLUX.1, Stable Diffusion 3, XL and 1.5."""

from matrix.case import Case

CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"

CASES = [
    Case(
        name="flux-t2i",
        family="flux",
        task="text-to-image",
        requests=(
            {"prompt": CAT, "seed": 1, "num_inference_steps": 4, "guidance_scale": 3.5},
            {"prompt": LONG, "seed": 2, "num_inference_steps": 6, "guidance_scale": 1.5},
            {"prompt": "", "seed": 3, "num_inference_steps": 3},
            {
                "prompt": "a dog",
                "seed": 4,
                "num_inference_steps": 2,
                "negative_prompt": "blurry",
                "true_cfg_scale": 3.0,
            },
        ),
        matters=("prompt", "seed", "guidance_scale"),
        fuses={
            "text_encoder.forward": 2.0,
            "text_encoder_2.forward": 2.0,
            "transformer.forward": 2.0,
            "vae.decode": 1.2,
        },
        is_fast=True,
    ),
]
