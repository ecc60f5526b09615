"""Helios."""

from typing import Any

from support.matrix.case import Case
from support.matrix.wan import CAT, LONG, with_images, without_ftfy

_PROMPTS: tuple[dict[str, Any], ...] = (
    {"prompt": CAT, "negative_prompt": "blurry", "seed": 1, "guidance_scale": 5.0},
    {"prompt": LONG, "negative_prompt": "a red balloon", "seed": 2, "guidance_scale": 2.0},
    {"prompt": "", "seed": 3, "guidance_scale": 1.0},
    {"prompt": "the moon", "seed": 4},
)
_STEPS: tuple[dict[str, Any], ...] = (
    {"num_inference_steps": 3, "num_frames": 10},  # two chunks
    {"num_inference_steps": 4},
    {"num_inference_steps": 3},
    {"num_inference_steps": 2},
)
_STAGES: tuple[dict[str, Any], ...] = (
    {"pyramid_num_inference_steps_list": [2, 2, 2], "num_frames": 10},  # stages differ in size:
    {"pyramid_num_inference_steps_list": [2, 2, 2], "num_frames": 10},  # in step they fuse most
    {"pyramid_num_inference_steps_list": [2, 1, 2]},
    {"pyramid_num_inference_steps_list": [2, 2, 3]},
)


def _laid(*layers: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The requests that have what each layer says of them."""
    return tuple(
        {k: v for one in parts for k, v in one.items()} for parts in zip(*layers, strict=True)
    )


MATTERS = ("prompt", "negative_prompt", "seed", "guidance_scale")
FUSES = {"text_encoder.forward": 2.5, "transformer.forward": 2.5, "vae.decode": 1.2}
CASES = [
    Case(
        name="helios-base-t2v",
        family="helios_base",
        adapt=without_ftfy,
        task="text-to-video",
        requests=_laid(_PROMPTS, _STEPS),
        matters=MATTERS,
        fuses=FUSES,
    ),
    Case(
        name="helios-base-i2v",
        family="helios_base",
        adapt=without_ftfy,
        task="image-to-video",
        requests=with_images(*_laid(_PROMPTS, _STEPS)),
        matters=(*MATTERS, "image"),
        fuses={**FUSES, "vae.encode": 1.8},
    ),
    Case(
        name="helios-mid-t2v",
        family="helios_mid",
        adapt=without_ftfy,
        task="text-to-video",
        requests=_laid(_PROMPTS, _STAGES),
        matters=MATTERS,
        fuses={**FUSES, "transformer.forward": 1.7},
    ),
    Case(  # guidance is distilled into it
        name="helios-distilled-t2v",
        family="helios_distilled",
        adapt=without_ftfy,
        task="text-to-video",
        requests=_laid(
            tuple({"prompt": one["prompt"], "seed": one["seed"]} for one in _PROMPTS), _STAGES
        ),
        matters=("prompt", "seed"),
        fuses={**FUSES, "transformer.forward": 2.1},  # who comes during a second run waits
    ),
]
