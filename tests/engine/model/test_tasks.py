"""A loaded model does all that diffusers can do with its modules, and all of it rides together."""

import re
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines import auto_pipeline
from diffusers.pipelines.ltx2.pipeline_output import LTX2PipelineOutput
from PIL import Image

from carpool.engine.model.tasks import _strength_rounds, linked_pipelines
from carpool.engine.model.view import PipelineOutput, finish
from carpool.errors import Rejected, SizeRejected
from carpool.request.parameters import check
from carpool.types import Request
from support.engine_driver import CLOSE, called, driving, gap, plain, solo
from support.tiny import ARGUMENTS

RNG = np.random.default_rng(0)
PICTURE = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), np.uint8))
HALF = Image.fromarray(np.tile(np.repeat([0, 255], 32).astype(np.uint8), (64, 1)))


def test_pipelines_are_linked_as_diffusers_auto_pipelines_link_them() -> None:
    classes = {one for table in auto_pipeline.SUPPORTED_TASKS_MAPPINGS for one in table.values()}
    tables = [
        {key: one.__name__ for key, one in table.items()}
        for table in (
            auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
            auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
        )
    ]
    for name in {one.__name__ for one in classes}:
        key = auto_pipeline._get_model(name)
        linked = [table[key] for table in tables if table.get(key, name) != name]
        is_decoder = re.match(r"Kandinsky(V22)?(?!.*Combined)(?!3)", name)  # it lacks its prior
        starts_from_a_picture = "mage" in name.replace("ImagePipeline", "")
        if not is_decoder and not starts_from_a_picture:
            assert linked_pipelines(name) == linked, name


def test_steps_are_counted_with_a_scheduler_that_has_no_order() -> None:
    pipe = diffusers.KandinskyV22PriorEmb2EmbPipeline.__new__(
        diffusers.KandinskyV22PriorEmb2EmbPipeline
    )
    vars(pipe)["scheduler"] = diffusers.UnCLIPScheduler()

    assert _strength_rounds(pipe) == "down"


def alone(pipeline: Any, seed: int, **arguments: Any) -> torch.Tensor:
    pipe = pipeline(**plain("flux").components)
    pipe.set_progress_bar_config(disable=True)
    image = called(pipe, seed, **{**ARGUMENTS["flux"], **arguments}).images
    assert isinstance(image, torch.Tensor)
    return image


def test_drawing_changing_and_filling_ride_in_one_forward() -> None:
    changing = {"prompt": "a dog", "image": PICTURE, "strength": 0.7, "num_inference_steps": 6}
    filling = {
        "prompt": "the moon", "image": PICTURE, "mask_image": HALF, "strength": 0.9,
        "num_inference_steps": 5,
    }  # fmt: skip

    with driving("flux") as drive:
        drawn = drive.submit("a cat", seed=1, **ARGUMENTS["flux"])
        changed = drive.submit(**{**ARGUMENTS["flux"], **changing}, seed=2)
        filled = drive.submit(**{**ARGUMENTS["flux"], **filling}, seed=3)
        drive.finish()

    assert gap(drawn.image, solo("flux", "a cat", seed=1)) < CLOSE
    assert gap(changed.image, alone(diffusers.FluxImg2ImgPipeline, 2, **changing)) < CLOSE
    assert gap(filled.image, alone(diffusers.FluxInpaintPipeline, 3, **filling)) < CLOSE
    assert drive.widest("transformer") == 3
    assert {task.name for task in drive.engine.loaded.card.tasks} == {
        "text-to-image",
        "image-to-image",
        "inpaint",
    }


@pytest.mark.parametrize(
    ("kind", "shape"), [("pil", None), ("np", (1, 3, 8, 10, 3)), ("pt", (1, 3, 3, 8, 10))]
)
def test_videos_come_in_the_type_asked_for_and_sound_beside_them_as_it_is(
    kind: str, shape: tuple[int, ...] | None
) -> None:
    frames, sound = torch.rand(1, 3, 3, 8, 10), torch.rand(1, 2, 99)
    output = LTX2PipelineOutput(frames=frames, audio=sound)

    fields = finish(
        PipelineOutput(output, None if kind == "pt" else kind),
        lambda tensor, convert: convert(tensor),
    )

    assert fields["audio"] is sound
    if shape is None:
        [video] = fields["frames"]
        assert [image.size for image in video] == [(10, 8)] * 3
    else:
        assert fields["frames"].shape == shape


def test_layers_come_as_a_list_of_pictures_for_each_request() -> None:
    layers = [torch.rand(3, 4, 8, 10)]

    [pictures] = finish(
        PipelineOutput({"images": layers}, "pil"), lambda tensor, convert: convert(tensor)
    )["images"]

    assert [(one.size, one.mode) for one in pictures] == [((10, 8), "RGBA")] * 3


@pytest.mark.parametrize(
    ("family", "strength", "works"),
    [
        ("flux", 0.0, False),
        ("flux", 1e-30, False),
        ("flux", 0.01, True),  # half a step is one
        ("sd15", 0.0, True),  # its scheduler has a step to spare
        ("sdxl", 0.0, False),
        ("sdxl", 0.3, False),  # half a step is none
        ("sdxl", 0.34, True),
    ],
)
def test_a_strength_is_refused_exactly_where_the_pipeline_would_have_no_step(
    family: str, strength: float, works: bool
) -> None:
    given: dict[str, Any] = {"strength": strength, "num_inference_steps": 3, "image": PICTURE}
    given = {**ARGUMENTS[family], **given}

    with driving(family) as drive:
        loaded = drive.engine.loaded
        task = loaded.card.task_for(["image"])
        known = {name: value for name, value in given.items() if task.takes(name)}
        pipe = loaded.originals[task.name]

        def runs() -> bool:
            try:
                return len(pipe(prompt="a cat", **known).images) == 1
            except Exception:  # whatever it is that no step leads to
                return False

        def is_taken() -> bool:
            try:
                check(loaded.card, Request("a cat", **known))
            except Rejected:
                return False
            return True

        assert (runs(), is_taken()) == (works, works)


@pytest.mark.parametrize(
    ("family", "multiple"), [("wan21_t2v", 16), ("wan22_i2v_a14b", 16), ("wan22_ti2v_5b", 32)]
)
def test_a_video_has_whole_patches_of_its_denoiser(family: str, multiple: int) -> None:
    with driving(family) as drive:
        card = drive.engine.loaded.card

    assert card.size_multiple_px == multiple
    with pytest.raises(SizeRejected, match=f"multiples of {multiple}, above 0; the nearest size"):
        check(card, Request("a cat", width=40, height=72))
