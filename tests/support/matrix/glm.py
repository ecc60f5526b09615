"""GLM-Image: plans of picture tokens, written by its own language model or given."""

from typing import Any

import numpy as np
import torch

from support.matrix.case import Case
from support.matrix.stable import PICTURES

_RANDOM = np.random.RandomState(0)
PLANS = [torch.from_numpy(_RANDOM.randint(0, 128, (1, 16))) for _ in range(4)]
"""Of pictures of 64x64 pixels, each token standing for 16x16."""


def edit_of(*pictures: int) -> dict[str, Any]:
    """Arguments for an edit of some of `PICTURES`, with what the language model would say of them.

    It cannot be asked: what its encoder of pictures gives, the pipeline flattens, and the next
    step of that encoder does not take it flat (diffusers 0.42 with transformers 5).
    """
    return {
        "image": [PICTURES[i] for i in pictures],
        "prior_token_image_ids": [torch.cat([PLANS[3 - i][0] for i in pictures])],
        "source_image_grid_thw": [torch.tensor([[1, 4, 4]] * len(pictures))],
    }


PLANNED: list[dict[str, Any]] = [
    {"seed": 1, "num_inference_steps": 4, "guidance_scale": 1.5, "prior_token_ids": PLANS[0]},
    {"seed": 2, "num_inference_steps": 6, "guidance_scale": 3.0, "prior_token_ids": PLANS[1]},
    {"seed": 3, "num_inference_steps": 3, "guidance_scale": 1.0, "prior_token_ids": PLANS[2]},
    {"seed": 4, "num_inference_steps": 2, "prior_token_ids": PLANS[3]},
]
CASES = [
    Case(
        name="glm-t2i",
        family="glm",
        task="text-to-image",
        requests=(
            {"prompt": "a photo of a cat", "seed": 1, "num_inference_steps": 4},
            {"prompt": 'the moon and "rain"', "seed": 2, "num_inference_steps": 3},
            {"prompt": "a 'dog'", "seed": 3, "num_inference_steps": 2, "prior_token_ids": PLANS[0]},
            {"prompt": "a horse", "seed": 4, "num_inference_steps": 5, "guidance_scale": 1.0,
             "prior_token_ids": PLANS[1]},
        ),
        fuses={
            "vision_language_encoder.generate": 2.0, "text_encoder.forward": 2.5,
            "transformer.forward": 2.0, "vae.decode": 1.5,
        },
    ),
    Case(
        name="glm-t2i-planned",
        family="glm",
        task="text-to-image",
        requests=(
            PLANNED[0] | {"prompt": "a sign that says 'cat'"},
            PLANNED[1] | {"prompt": "a sign that says 'astronaut' and 'red balloon'"},
            PLANNED[2] | {"prompt": "a dog"},
            PLANNED[3] | {"prompt": ""},
        ),
        matters=("prompt", "seed", "guidance_scale"),
        fuses={"text_encoder.forward": 2.5, "transformer.forward": 1.8, "vae.decode": 1.5},
    ),
    Case(
        name="glm-edit",
        family="glm",
        task="edit",
        requests=(
            PLANNED[0] | {"prompt": "make the 'cat' blue", **edit_of(0)},
            PLANNED[1] | {"prompt": "write 'astronaut' in the sky", **edit_of(1, 2)},
            PLANNED[2] | {"prompt": "a dog", **edit_of(2)},
            PLANNED[3] | {"prompt": "a horse"},  # from scratch, beside them
        ),
        matters=("prompt", "seed", "guidance_scale", "image"),
        fuses={
            "text_encoder.forward": 2.0,
            "transformer.forward": 1.15,  # what reads or writes a cache of pictures runs alone
            "vae.encode": 2.0, "vae.decode": 1.2,
        },
    ),
]  # fmt: skip
