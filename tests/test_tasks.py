"""A loaded model does all that diffusers can do with its modules, and all of it rides together."""

from typing import Any

import numpy as np
import torch
from diffusers import FluxImg2ImgPipeline, FluxInpaintPipeline
from PIL import Image

from support import CLOSE, driving, gap, plain, solo
from tiny import ARGUMENTS

RNG = np.random.default_rng(0)
PICTURE = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), np.uint8))
HALF = Image.fromarray(np.tile(np.repeat([0, 255], 32).astype(np.uint8), (64, 1)))


def alone(pipeline: Any, seed: int, **arguments: Any) -> torch.Tensor:
    pipe = pipeline(**plain("flux").components)
    pipe.set_progress_bar_config(disable=True)
    given = {**ARGUMENTS["flux"], **arguments}
    image = pipe(**given, generator=torch.Generator().manual_seed(seed)).images
    assert isinstance(image, torch.Tensor)
    return image


def test_drawing_changing_and_filling_ride_in_one_forward() -> None:
    changing = {"prompt": "a dog", "image": PICTURE, "strength": 0.7, "num_inference_steps": 6}
    filling = {
        "prompt": "the moon",
        "image": PICTURE,
        "mask_image": HALF,
        "strength": 0.9,
        "num_inference_steps": 5,
    }

    with driving("flux") as drive:
        drawn = drive.submit("a cat", seed=1, **ARGUMENTS["flux"])
        changed = drive.submit(**{**ARGUMENTS["flux"], **changing}, seed=2)
        filled = drive.submit(**{**ARGUMENTS["flux"], **filling}, seed=3)
        drive.finish()

    assert gap(drawn.image, solo("flux", "a cat", seed=1)) < CLOSE
    assert gap(changed.image, alone(FluxImg2ImgPipeline, 2, **changing)) < CLOSE
    assert gap(filled.image, alone(FluxInpaintPipeline, 3, **filling)) < CLOSE
    assert drive.widest("transformer") == 3
    assert {task.name for task in drive.engine.loaded.card.tasks} == {
        "text-to-image",
        "image-to-image",
        "inpaint",
    }
