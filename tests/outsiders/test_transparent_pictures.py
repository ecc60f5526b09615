"""Pictures and masks with transparency, as AUTOMATIC1111's API reads them."""

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.app import ask
from support.endpoints import EDITS
from support.forms import BOTH, CHANGE, worker_of
from support.pictures import saved

SIZE = (64, 48)
PATH = "/sdapi/v1/img2img"


def b64(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return base64.b64encode(out.getvalue()).decode()


def arguments(body: dict[str, Any], path: str = PATH, card: Any = BOTH) -> Mapping[str, Any]:
    worker = worker_of(card)
    answer = ask(json.dumps({"prompt": "a", **body}), path, worker=worker)
    assert answer.status_code == 200, answer.text
    return worker.jobs[0].arguments


def masked(mask: str, **fields: Any) -> np.ndarray:
    """The mask that the pipeline gets, as rows of values."""
    body = {"init_images": [b64(Image.new("RGB", SIZE, "red"))], "mask": mask, **fields}
    body = {"inpainting_fill": 1, **body}
    return np.asarray(arguments(body)["mask_image"])


def alpha(left: int, right: int) -> Image.Image:
    image = Image.new("L", SIZE, left)
    image.paste(right, (32, 0, *SIZE))
    return image


def with_alpha(mode: str, left: int, right: int, colour: Any = 255) -> Image.Image:
    """A picture of one colour whose halves have these alphas."""
    bands = Image.new(mode[:-1], SIZE, colour).split()
    return Image.merge(mode, (*bands, alpha(left, right)))


def palette(left: int, right: int) -> tuple[Image.Image, bytes]:
    """A picture of two white entries, and the alphas of these."""
    image = Image.new("P", SIZE, 0)
    image.putpalette([255, 255, 255] * 2)
    image.paste(1, (32, 0, *SIZE))
    return image, bytes((left, right))


# Masks


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize(("left", "right"), [(0, 255), (255, 0), (0, 254), (128, 129), (254, 255)])
def test_alpha_is_the_mask_where_any_is_below_255(mode: str, left: int, right: int) -> None:
    colour = (255, 255, 255) if mode == "RGBA" else 255

    values = masked(b64(with_alpha(mode, left, right, colour)))

    assert (values[:, :32] == (255 if left > 128 else 0)).all()
    assert (values[:, 32:] == (255 if right > 128 else 0)).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_the_colours_are_the_mask_where_all_is_opaque(mode: str) -> None:
    bands = [alpha(10, 200)] * (len(mode) - 1)
    image = Image.merge(mode, (*bands, Image.new("L", SIZE, 255)))

    values = masked(b64(image))

    assert (values[:, :32] == 10).all()
    assert (values[:, 32:] == 200).all()


def test_a_palette_or_a_colour_may_be_transparent_too() -> None:
    image, alphas = palette(0, 255)
    values = masked(b64(image, transparency=alphas))
    assert (values[:, :32].max(), values[:, 32:].min()) == (0, 255)

    grey = alpha(7, 255)
    values = masked(b64(grey, transparency=7))  # a PNG of mode L whose 7 is transparent
    assert (values[:, :32].max(), values[:, 32:].min()) == (0, 255)

    webp = masked(b64(with_alpha("RGBA", 0, 255, (9, 9, 9)), "WEBP", lossless=True, exact=True))
    assert (webp[:, :32].max(), webp[:, 32:].min()) == (0, 255)


def test_alpha_is_rounded_unless_that_is_switched_off() -> None:
    mask = b64(with_alpha("RGBA", 100, 200, (0, 0, 0)))

    assert sorted(set(masked(mask).ravel())) == [0, 255]
    assert sorted(set(masked(mask, mask_round=False).ravel())) == [100, 200]
    assert sorted(set(masked(mask, mask_round=False, inpainting_mask_invert=1).ravel())) == [
        55, 155,
    ]  # fmt: skip


def test_blur_may_differ_in_x_and_y_and_one_number_is_for_both() -> None:
    mask = Image.new("L", SIZE, 0)
    mask.paste(255, (32, 24, *SIZE))

    across = masked(b64(mask), mask_blur_x=4, mask_blur_y=0)
    both = masked(b64(mask), mask_blur=4, mask_blur_x=0, mask_blur_y=0)

    assert 0 < across[40, 30] < 255
    assert (across[22, 60], across[26, 60]) == (0, 255)
    assert 0 < both[22, 60] < 255


def test_a_mask_is_blurred_in_its_own_size() -> None:
    mask = Image.new("L", (640, 480), 0)
    mask.paste(255, (320, 0, 640, 480))

    values = masked(b64(mask), mask_blur=5)  # half a pixel of the picture

    assert (values[:, 29].max(), values[:, 35].min()) == (0, 255)


@pytest.mark.parametrize("radius", [-1, 65, 1.5, "soft"])
@pytest.mark.parametrize("name", ["mask_blur", "mask_blur_x", "mask_blur_y"])
def test_a_blur_that_is_none_is_refused_by_its_name(name: str, radius: Any) -> None:
    picture = b64(Image.new("RGB", SIZE))
    body = {"prompt": "a", "init_images": [picture], "mask": picture, name: radius}

    answer = ask(json.dumps({**body, "inpainting_fill": 1}), PATH, worker=worker_of(BOTH))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


# Pictures that are drawn anew


RED, PINK, WHITE = (255, 0, 0), (255, 127, 127), (255, 255, 255)


def begun(image: str, **fields: Any) -> Image.Image:
    drawn: Image.Image = arguments({"init_images": [image], **fields})["image"]
    assert drawn.mode == "RGB"
    return drawn


def colours(image: Image.Image) -> list[Any]:
    return [image.getpixel((x, 20)) for x in (4, 60)]


def test_what_is_transparent_becomes_white() -> None:
    [left, right] = colours(begun(b64(with_alpha("RGBA", 128, 0, RED))))
    assert max(abs(a - b) for a, b in zip(left, PINK, strict=True)) <= 1
    assert right == WHITE

    assert colours(begun(b64(with_alpha("LA", 0, 255, 0)))) == [WHITE, (0, 0, 0)]
    webp = b64(with_alpha("RGBA", 0, 255, RED), "WEBP", lossless=True, exact=True)
    assert colours(begun(webp)) == [WHITE, RED]
    assert colours(begun(b64(Image.new("RGB", SIZE, RED), transparency=RED))) == [WHITE, WHITE]
    image, alphas = palette(255, 0)
    image.putpalette([255, 0, 0] * 2)
    assert colours(begun(b64(image, transparency=alphas))) == [RED, WHITE]


def test_opaque_pictures_stay_as_they_are() -> None:
    for image in (with_alpha("RGBA", 255, 255, RED), Image.new("RGB", SIZE, RED)):
        assert colours(begun(b64(image))) == [RED, RED]


def test_a_picture_that_is_made_smaller_is_white_there_too() -> None:
    large = with_alpha("RGBA", 0, 255, RED).resize((640, 480))

    image = begun(b64(large))

    assert image.width < 640
    assert colours(image.resize(SIZE)) == [WHITE, RED]


def test_a_model_that_takes_transparency_gets_it() -> None:
    card = replace(BOTH, tasks=(BOTH.tasks[0], replace(CHANGE, image_mode="RGBA")))

    image = arguments({"init_images": [b64(with_alpha("RGBA", 0, 255, RED))]}, card=card)["image"]

    assert (image.mode, image.getpixel((4, 20))[3]) == ("RGBA", 0)


def test_other_doors_do_as_diffusers_does() -> None:
    """`convert("RGB")` leaves the colours that transparent pixels have."""
    sent = saved(with_alpha("RGBA", 0, 255, RED))
    url = "data:image/png;base64," + base64.b64encode(sent).decode()

    image = arguments({"images": [{"image_url": url}]}, EDITS)["image"]

    assert colours(image) == [RED, RED]
