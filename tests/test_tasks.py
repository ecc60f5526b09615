"""A loaded model does all that diffusers can do with its modules, and all of it rides together."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxInpaintPipeline
from diffusers.pipelines.ltx2.pipeline_output import LTX2PipelineOutput
from PIL import Image

from carpool.engine.pipeline import finish
from carpool.errors import UnsupportedParameter
from carpool.parameters import Card, Parameter, Task
from carpool.server.images import Served, make_jobs
from carpool.server.schema import ImageRequest
from carpool.types import Job
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


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("pil", None), ("np", (1, 3, 8, 10, 3)), ("pt", (1, 3, 3, 8, 10))],
)
def test_videos_come_in_the_type_asked_for_and_sound_beside_them_as_it_is(
    kind: str, shape: tuple[int, ...] | None
) -> None:
    frames, sound = torch.rand(1, 3, 3, 8, 10), torch.rand(1, 2, 99)
    output = LTX2PipelineOutput(frames=frames, audio=sound)
    job = Job(request_id="a", seed=0, arguments={"output_type": kind})

    fields = finish(output, job, lambda tensor: tensor)

    assert fields["audio"] is sound
    if shape is None:
        [video] = fields["frames"]
        assert [image.size for image in video] == [(10, 8)] * 3
    else:
        assert fields["frames"].shape == shape


def test_layers_come_as_a_list_of_pictures_for_each_request() -> None:
    layers = [torch.rand(3, 4, 8, 10)]
    job = Job(request_id="a", seed=0, arguments={})

    [pictures] = finish({"images": layers}, job, lambda tensor: tensor)["images"]

    assert [(one.size, one.mode) for one in pictures] == [((10, 8), "RGBA")] * 3


def test_the_image_endpoint_refuses_a_model_that_makes_videos() -> None:
    task = Task("text-to-video", "WanPipeline", (Parameter("prompt", "str"),))
    card = Card("wan", (task,), {}, 16, None, 1 << 20, 100)

    with pytest.raises(UnsupportedParameter, match="wan makes videos, and this endpoint answers"):
        make_jobs(Served("wan", card, 10), ImageRequest.model_validate({"prompt": "a cat"}))
