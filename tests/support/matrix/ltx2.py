"""LTX-2."""

from typing import Any

from support.matrix.case import Case
from support.matrix.stable import to
from support.matrix.wan import CAT, LONG, with_images

UNGUIDED = {  # one call a step, of one row
    "guidance_scale": 1.0, "audio_guidance_scale": 1.0, "stg_scale": 0.0, "audio_stg_scale": 0.0,
    "modality_scale": 1.0, "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0, "audio_guidance_rescale": 0.0,
}  # fmt: skip
REQUESTS: tuple[dict[str, Any], ...] = (
    {
        "prompt": CAT, "negative_prompt": "blurry", "seed": 1, "num_inference_steps": 4,
        "guidance_scale": 3.0, "stg_scale": 4.0, "modality_scale": 3.0, "audio_guidance_scale": 7.0,
    },
    {
        "prompt": LONG, "negative_prompt": "a red balloon", "seed": 2, "num_inference_steps": 5,
        "guidance_scale": 5.0, "stg_scale": 0.3, "modality_scale": 1.5, "audio_guidance_scale": 2.0,
    },
    {"prompt": "", "seed": 3, "num_inference_steps": 3, **UNGUIDED},
    {"prompt": "the moon", "seed": 4, "num_inference_steps": 2},
)  # fmt: skip
MATTERS = (
    *("prompt", "negative_prompt", "seed"),
    *("guidance_scale", "stg_scale", "modality_scale", "audio_guidance_scale"),
)
FUSES = {
    "text_encoder.forward": 2.5, "connectors.forward": 1.8, "transformer.forward": 2.5,
    "vae.decode": 1.2, "audio_vae.decode": 1.2, "vocoder.forward": 1.2,
}  # fmt: skip
CASES = [
    Case(
        name="ltx2-t2v", is_fast=True, family="ltx2", task="text-to-video",
        requests=REQUESTS, matters=MATTERS, fuses=FUSES,
    ),
    Case(
        name="ltx2-i2v", family="ltx2", task="image-to-video", adapt=to("LTX2ImageToVideoPipeline"),
        common={"image_crf": 0},  # no re-compression: that takes PyAV
        requests=with_images(*REQUESTS), matters=(*MATTERS, "image"),
        fuses={**FUSES, "vae.encode": 1.8},
    ),
]  # fmt: skip
