"""Pictures survive their encoding, and a PNG gives back the settings that made it."""

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool.errors import InvalidValue
from carpool.media import (
    Format,
    encode,
    encode_image,
    encode_video,
    read_picture,
    read_settings,
)

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
others = st.dictionaries(st.text(), values, max_size=4)
known = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(),
        "negative_prompt": st.text(),
        "num_inference_steps": st.integers(1, 1000),
        "guidance_scale": st.floats(0, 20),
        "true_cfg_scale": st.floats(0, 20),
        "seed": st.integers(0, 2**63 - 1),
        "model": st.text(),
    },
)


def opened(encoded: bytes) -> Image.Image:
    with Image.open(io.BytesIO(encoded)) as image:
        image.load()
        return image


@st.composite
def pictures(draw: st.DrawFn) -> tuple[bytes, int, int]:
    width, height = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    size = 3 * width * height
    return draw(st.binary(min_size=size, max_size=size)), width, height


def noise(width: int = 32, height: int = 16) -> bytes:
    return bytes((7 * i * i + 3 * i) % 251 for i in range(3 * width * height))


@given(pictures(), others)
def test_a_png_gives_back_every_pixel(
    picture: tuple[bytes, int, int], settings: dict[str, Any]
) -> None:
    rgb, width, height = picture

    image = opened(encode(rgb, width, height, settings=settings))

    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (width, height))
    assert image.tobytes() == rgb


@given(known, others)
def test_a_png_gives_back_its_settings(known: dict[str, Any], others: dict[str, Any]) -> None:
    settings = {**others, **known}

    assert read_settings(encode(b"\0\0\0", 1, 1, settings=settings)) == settings


def test_settings_are_readable_by_other_tools_too() -> None:
    settings = {
        "prompt": "ein Bär ⭐\nund 熊",
        "negative_prompt": "blau",
        "num_inference_steps": 12,
        "guidance_scale": 3.5,
        "seed": 2**63 - 1,
        "width": 64,
        "height": 32,
        "model": "org/name",
    }

    text = opened(encode(noise(64, 32), 64, 32, settings=settings)).info

    assert json.loads(text["carpool"]) == settings
    assert text["parameters"] == (
        "ein Bär ⭐\nund 熊\nNegative prompt: blau\n"
        "Steps: 12, CFG scale: 3.5, Seed: 9223372036854775807, Size: 64x32, Model: org/name"
    )


def test_the_guidance_that_was_used_is_the_one_that_is_told() -> None:
    settings = {"guidance_scale": 3.5, "true_cfg_scale": 2.0}

    assert "CFG scale: 2.0" in opened(encode(b"\0\0\0", 1, 1, settings=settings)).info["parameters"]


@pytest.mark.parametrize("settings", [None, {}])
def test_a_png_without_settings_has_no_text(settings: dict[str, Any] | None) -> None:
    png = encode(b"\0\0\0", 1, 1, settings=settings)

    assert read_settings(png) == {}
    assert not opened(png).info


def test_a_long_prompt_is_carried_whole() -> None:
    settings = {"prompt": "熊" * 32_000, "negative_prompt": "x" * 1_000_000}

    assert read_settings(encode(b"\0\0\0", 1, 1, settings=settings)) == settings


def test_a_strange_png_has_no_settings_and_another_format_is_refused() -> None:
    out = io.BytesIO()
    Image.new("L", (2, 2)).save(out, "PNG")

    assert read_settings(out.getvalue()) == {}
    with pytest.raises(OSError, match="cannot identify"):
        read_settings(encode(b"\0\0\0", 1, 1, format="webp"))


@pytest.mark.parametrize("format_", ["jpeg", "webp"])
@given(picture=pictures(), compression=st.integers(0, 100))
def test_jpeg_and_webp_decode_to_the_right_size(
    format_: Format, picture: tuple[bytes, int, int], compression: int
) -> None:
    rgb, width, height = picture

    image = opened(encode(rgb, width, height, format=format_, compression=compression))

    assert (image.format, image.mode) == (format_.upper(), "RGB")
    assert image.size == (width, height)


@pytest.mark.parametrize("format_", ["jpeg", "webp"])
def test_a_lower_compression_value_gives_a_smaller_file(format_: Format) -> None:
    sizes = [
        len(encode(noise(), 32, 16, format=format_, compression=compression))
        for compression in (0, 30, 60, 100)
    ]

    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize("format_", ["png", "jpeg", "webp"])
def test_a_picture_with_three_bands_is_the_same_either_way(format_: Format) -> None:
    image = Image.frombytes("RGB", (32, 16), noise())

    assert encode_image(image, format_, 80) == encode(
        noise(), 32, 16, format=format_, compression=80
    )


def test_a_video_plays_as_it_was_drawn_and_says_how_it_was_made() -> None:
    frames = [Image.new("RGB", (48, 33), colour) for colour in ("red", "lime", "blue")]

    mp4 = encode_video(frames, 12, {"prompt": "a red circle", "seed": 7})

    with av.open(io.BytesIO(mp4), "r") as container:
        [stream] = container.streams.video
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert stream.average_rate == 12
        assert json.loads(container.metadata["comment"]) == {"prompt": "a red circle", "seed": 7}
    assert len(shown) == 3
    for picture, drawn in zip(shown, frames, strict=True):
        assert picture.shape == (32, 48, 3)
        assert abs(picture.mean(axis=(0, 1)) - np.asarray(drawn).mean(axis=(0, 1))).max() < 12


def test_a_picture_is_read_upright_and_in_the_mode_that_pipelines_want(tmp_path: Path) -> None:
    turned = Image.new("RGBA", (40, 20), "red")
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned.save(tmp_path / "turned.png", exif=exif)

    picture = read_picture(tmp_path / "turned.png")
    mask = read_picture(tmp_path / "turned.png", is_mask=True)

    assert (picture.size, picture.mode) == ((20, 40), "RGB")
    assert (mask.size, mask.mode) == ((20, 40), "L")


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file.png"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidValue, match=r"file\.png: not a picture that can be read"):
        read_picture(path)
