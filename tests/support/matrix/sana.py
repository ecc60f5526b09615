"""SANA and SANA 1.5."""

from typing import Any

from support.matrix.case import Case

CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"

_T2I: dict[str, Any] = {
    "task": "text-to-image",
    "requests": (
        {
            "prompt": CAT, "seed": 1, "num_inference_steps": 4, "guidance_scale": 4.5,
            "negative_prompt": "blurry",
        },
        {
            "prompt": LONG, "seed": 2, "num_inference_steps": 6, "guidance_scale": 2.0,
            "negative_prompt": "a red balloon",
        },
        {
            "prompt": "a dog", "seed": 3, "num_inference_steps": 3, "guidance_scale": 1.0,
            "max_sequence_length": 12,
        },
        {
            "prompt": LONG, "seed": 4, "num_inference_steps": 2,
            "complex_human_instruction": ["Say what is in the picture:"],
        },
    ),
    "matters": ("prompt", "seed", "guidance_scale", "negative_prompt"),
    "fuses": {"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.5},
}  # fmt: skip
CASES = [
    Case(name="sana-t2i", family="sana", **_T2I),
    Case(name="sana15-t2i", family="sana15", **_T2I),
]
