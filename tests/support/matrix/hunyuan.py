"""HunyuanVideo."""

from typing import Any

from support.matrix.case import Case
from support.matrix.wan import CAT, LONG, with_images

REQUESTS: tuple[dict[str, Any], ...] = (
    {
        "prompt": CAT, "negative_prompt": "blurry", "seed": 1, "num_inference_steps": 4,
        "guidance_scale": 6.0, "true_cfg_scale": 3.0,
    },
    {
        "prompt": LONG, "negative_prompt": "a red balloon", "seed": 2, "num_inference_steps": 6,
        "guidance_scale": 1.5, "true_cfg_scale": 6.0,
    },
    {"prompt": "", "seed": 3, "num_inference_steps": 3, "max_sequence_length": 20},
    {"prompt": "the moon", "seed": 4, "num_inference_steps": 2},
)  # fmt: skip
MATTERS = ("prompt", "negative_prompt", "seed", "guidance_scale", "true_cfg_scale")
_I2V: dict[str, Any] = {
    "task": "image-to-video", "requests": with_images(*REQUESTS),
    "fuses": {
        "text_encoder.forward": 3.0, "text_encoder_2.forward": 3.0, "vae.encode": 2.5,
        "transformer.forward": 2.3, "vae.decode": 1.6,
    },
}  # fmt: skip
CASES = [
    Case(
        name="hunyuan-t2v", family="hunyuan_t2v", task="text-to-video",
        requests=REQUESTS, matters=MATTERS,
        fuses={
            "text_encoder.forward": 3.0, "text_encoder_2.forward": 3.0,
            "transformer.forward": 2.3, "vae.decode": 1.2,
        },
    ),
    Case(name="hunyuan-i2v", family="hunyuan_i2v", matters=(*MATTERS, "image"), **_I2V),
    Case(  # its guidance is not embedded
        name="hunyuan-i2v-33ch",
        family="hunyuan_i2v_33ch",
        matters=(*(name for name in MATTERS if name != "guidance_scale"), "image"),
        **_I2V,
    ),
]  # fmt: skip
