"""Pictures that do not suit the model are refused before they wait in any line."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from carpool.errors import InvalidValue, MaskMismatch, MissingParameter, UnknownParameter
from carpool.request.card import Card, Parameter, Task
from carpool.request.images import ORIENTATION, size_of
from carpool.request.parameters import check
from carpool.types import Request

COMMON = (Parameter("prompt", "str"), Parameter("num_inference_steps", "int", default=4))
IMAGE, MASK = Parameter("image", "other"), Parameter("mask_image", "other")
STRENGTH = Parameter("strength", "float", default=0.6)
TASKS = (
    Task("text-to-image", "TextPipeline", COMMON),
    Task("image-to-image", "Img2ImgPipeline", (*COMMON, IMAGE, STRENGTH)),
    Task("inpaint", "InpaintPipeline", (*COMMON, IMAGE, MASK, STRENGTH)),
)
CARD = Card("model", TASKS, {}, 16, (64, 64), 128 * 128, 100)


def editor(**task: Any) -> Card:
    """A model that reads references beside the prompt."""
    one = Task("edit", "EditPipeline", (*COMMON, IMAGE), **task)
    return Card("editor", (one,), {}, 16, (64, 64), 128 * 128, 100)


def picture(width: int = 64, height: int = 64, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), "white")


def turned() -> Image.Image:
    one = picture()
    one.getexif()[ORIENTATION] = 6
    return one


def test_the_pictures_given_choose_the_task() -> None:
    def task(**given: Any) -> str:
        return check(CARD, Request("a cat", **given)).task

    assert task() == "text-to-image"
    assert task(image=picture()) == "image-to-image"
    assert task(image=picture(), strength=0.3) == "image-to-image"
    assert task(image=picture(), mask_image=picture(mode="L")) == "inpaint"
    assert task(image=None) == "text-to-image"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"image": "cat.png"}, "image is a str: give a PIL image or a tensor"),
        ({"image": picture(8, 64)}, "image has 8x64 pixels: each side must have at least 16"),
        ({"image": picture(129, 128)}, "129x128 pixels.*at most 16384 pixels"),
        ({"image": torch.zeros(1, 3, 64, 8)}, "image has 8x64 pixels"),
        ({"image": np.zeros((1, 8, 64, 3))}, "image has 64x8 pixels"),
        ({"image": picture(mode="RGBA")}, "mode RGBA: must be RGB; image.convert.'RGB'. gives"),
        ({"image": picture(mode="P")}, "mode P: must be RGB"),
        ({"image": turned()}, "EXIF orientation 6.: must be upright; PIL.ImageOps.exif_transpose"),
        ({"image": [picture(), picture()]}, "image is a list of 2: this model takes one"),
        ({"image": []}, "image is a list of 0"),
        ({"image": Image.open(BytesIO(b"P6 64 64 255\n"))}, "image cannot be read: .*truncated"),
        (
            {"image": picture(), "mask_image": picture(64, 32, "L")},
            "mask_image has 64x32 pixels, and image 64x64: both must have the same size",
        ),
        ({"image": picture(), "mask_image": picture(mode="RGBA")}, "RGBA: must be L or 1 or RGB"),
    ],
)
def test_a_picture_that_does_not_suit_is_refused_with_the_rule(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidValue, match=says) as refused:
        check(CARD, Request("a cat", **given))

    assert refused.value.param in given


def test_a_mask_of_a_pictures_proportions_is_made_as_large_by_the_pipeline() -> None:
    small = Request("a cat", image=picture(), mask_image=picture(32, 32, "L"))

    assert check(CARD, small).arguments["mask_image"].size == (32, 32)


def test_a_mask_without_an_image_is_refused() -> None:
    with pytest.raises(MissingParameter, match="image is missing: mask_image says which part"):
        check(CARD, Request("a cat", mask_image=picture(mode="L")))


def test_a_parameter_of_another_task_says_what_that_task_wants() -> None:
    with pytest.raises(UnknownParameter, match="'strength': image-to-image takes it, with image"):
        check(CARD, Request("a cat", strength=0.5))


def test_references_are_counted_by_what_the_model_takes() -> None:
    two = [picture(), picture(32, 96)]

    assert check(editor(max_images=2), Request("a cat", image=two)).task == "edit"
    with pytest.raises(InvalidValue, match="list of 3: this model takes from 1 to 2"):
        check(editor(max_images=2), Request("a cat", image=[*two, picture()]))


def test_models_that_read_transparency_want_it() -> None:
    card = editor(image_mode="RGBA")

    assert check(card, Request("a cat", image=picture(mode="RGBA")))
    with pytest.raises(InvalidValue, match="mode RGB: must be RGBA"):
        check(card, Request("a cat", image=picture()))


def test_sizes_are_read_by_the_habits_of_diffusers() -> None:
    assert size_of(picture(4, 2)) == (4, 2)
    assert size_of(torch.zeros(3, 2, 4)) == size_of(torch.zeros(1, 3, 2, 4)) == (4, 2)
    assert size_of(np.zeros((2, 4, 3))) == size_of(np.zeros((1, 2, 4, 3))) == (4, 2)
    assert size_of(np.zeros((2, 4))) == (4, 2)
    assert size_of("cat.png") is size_of(3) is None


@pytest.mark.parametrize(
    "mask",
    [
        Image.new("L", (64, 64)), Image.new("1", (64, 64)), Image.new("RGB", (64, 64)),
        np.zeros((64, 64), np.float32), torch.zeros(1, 1, 64, 64),
    ],
    ids=["L", "1", "RGB", "array", "tensor"],
)  # fmt: skip
def test_a_mask_that_marks_nothing_is_refused(mask: Any) -> None:
    with pytest.raises(MaskMismatch, match="mask_image marks nothing: the parts to redraw"):
        check(CARD, Request("a cat", image=picture(), mask_image=mask))


def test_a_grid_of_pictures_may_have_a_gap_and_a_list_may_not() -> None:
    card = editor(max_images=3)
    grid = [[picture(), picture()], [picture(), None]]  # VisualCloze draws what is missing

    assert check(card, Request("a", image=grid)).arguments["image"] == grid
    with pytest.raises(InvalidValue, match="image is a NoneType"):
        check(card, Request("a", image=[picture(), None]))


def test_a_mask_needs_no_picture_where_the_pipeline_takes_none() -> None:
    latents = Task("inpaint", "DiffEditPipeline", (*COMMON, MASK, Parameter("latents", "other")))
    card = Card("model", (latents,), {}, 16, (64, 64), 128 * 128, 100)

    assert check(card, Request("a cat", mask_image=picture(mode="L"))).task == "inpaint"
