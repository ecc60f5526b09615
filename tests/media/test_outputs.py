"""Pictures survive their encoding, and files say how they were made, if they may."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool.errors import InvalidValue
from carpool.media import Format, encode_image, read_picture
from carpool.media.metadata import without_prompts
from support.pictures import picture as opened
from support.pictures import read_settings

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
others = st.dictionaries(st.text(), values, max_size=4)
known = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(), "negative_prompt": st.text(),
        "num_inference_steps": st.integers(1, 1000), "guidance_scale": st.floats(0, 20),
        "true_cfg_scale": st.floats(0, 20), "seed": st.integers(0, 2**63 - 1), "model": st.text(),
    },
)  # fmt: skip


@dataclass(frozen=True)
class RawPicture:
    """A picture as a worker sends it."""

    width: int
    height: int
    rgb: bytes


@st.composite
def pictures(draw: st.DrawFn) -> RawPicture:
    width, height = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    size = 3 * width * height
    return RawPicture(width, height, draw(st.binary(min_size=size, max_size=size)))


def noise(width: int = 32, height: int = 16) -> RawPicture:
    rgb = bytes((7 * i * i + 3 * i) % 251 for i in range(3 * width * height))
    return RawPicture(width, height, rgb)


DOT = RawPicture(1, 1, b"\0\0\0")


def comment(encoded: bytes) -> str:
    """The text in the EXIF of a JPEG or WebP."""
    block: bytes = opened(encoded).getexif().get_ifd(0x8769)[0x9286]
    assert block.startswith(b"UNICODE\0")
    return block[8:].decode("utf-16-be")


def says_a_model_made_it(xmp: str | bytes) -> bool:
    """Reads the XMP as any reader of RDF would."""
    [told] = ElementTree.fromstring(xmp).iter(f"{RDF}Description")
    return told.attrib[f"{IPTC}DigitalSourceType"] == MADE_BY_A_MODEL


RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
IPTC = "{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}"
MADE_BY_A_MODEL = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"


@given(pictures(), others)
def test_a_png_gives_back_every_pixel(picture: RawPicture, settings: dict[str, Any]) -> None:
    image = opened(encode_image(picture, "png", metadata=settings))

    assert (image.format, image.mode) == ("PNG", "RGB")
    assert image.size == (picture.width, picture.height)
    assert image.tobytes() == picture.rgb


@given(known, others)
def test_a_png_gives_back_its_settings(known: dict[str, Any], others: dict[str, Any]) -> None:
    settings = {**others, **known}

    assert read_settings(encode_image(DOT, "png", metadata=settings)) == settings


def test_settings_are_readable_by_other_tools_too() -> None:
    settings = {
        "prompt": "ein Bär ⭐\nund 熊", "negative_prompt": "blau", "num_inference_steps": 12,
        "guidance_scale": 3.5, "seed": 2**63 - 1, "width": 64, "height": 32, "model": "org/name",
    }  # fmt: skip

    text = opened(encode_image(noise(64, 32), "png", metadata=settings)).info

    assert json.loads(text["carpool"]) == settings
    assert text["parameters"] == (
        "ein Bär ⭐\nund 熊\nNegative prompt: blau\n"
        "Steps: 12, CFG scale: 3.5, Seed: 9223372036854775807, Size: 64x32, Model: org/name"
    )


def test_the_guidance_that_was_used_is_the_one_that_is_told() -> None:
    settings = {"guidance_scale": 3.5, "true_cfg_scale": 2.0}

    assert (
        "CFG scale: 2.0" in opened(encode_image(DOT, "png", metadata=settings)).info["parameters"]
    )


@pytest.mark.parametrize("format_", ["png", "jpeg", "webp"])
def test_without_metadata_a_file_says_nothing(format_: Format) -> None:
    image = opened(encode_image(noise(), format_))

    assert not image.info.keys() - {"jfif", "jfif_version", "jfif_unit", "jfif_density", "loop",
                                    "background", "timestamp", "duration"}  # fmt: skip
    assert not image.getexif()


@pytest.mark.parametrize("settings", [{}, {"seed": 7, "prompt": "a & <b>"}])
@pytest.mark.parametrize(
    ("format_", "key"), [("png", "XML:com.adobe.xmp"), ("jpeg", "xmp"), ("webp", "xmp")]
)
def test_with_metadata_a_file_says_that_a_model_made_it(
    format_: Format, key: str, settings: dict[str, Any]
) -> None:
    assert says_a_model_made_it(opened(encode_image(noise(), format_, 90, settings)).info[key])


@pytest.mark.parametrize("format_", ["jpeg", "webp"])
def test_jpeg_and_webp_carry_the_settings_as_text(format_: Format) -> None:
    settings = {"prompt": "ein Bär ⭐", "revised_prompt": "a, b", "seed": 5, "x": "\ud800"}
    expected = 'ein Bär ⭐\nSeed: 5, Revised prompt: "a, b"'
    assert comment(encode_image(noise(), format_, 90, settings)) == expected


def test_a_prompt_that_does_not_fit_into_a_jpeg_is_left_out_of_it() -> None:
    settings = {"prompt": "熊" * 32_760, "seed": 5}

    assert comment(encode_image(noise(), "jpeg", 90, settings)) == "Seed: 5"
    assert comment(
        encode_image(noise(), "jpeg", 90, settings | {"prompt": "熊" * 32_000})
    ).endswith("5")


def test_settings_without_prompts_say_nothing_that_the_caller_wrote() -> None:
    settings = {"prompt": "a", "negative_prompt": "b", "prompt_2": "c", "seed": 5, "width": 64}

    assert without_prompts(settings) == {"seed": 5, "width": 64}


def test_a_long_prompt_is_carried_whole() -> None:
    settings = {"prompt": "熊" * 32_000, "negative_prompt": "x" * 1_000_000}

    assert read_settings(encode_image(DOT, "png", metadata=settings)) == settings


def test_a_strange_png_has_no_settings_and_another_format_is_refused() -> None:
    out = io.BytesIO()
    Image.new("L", (2, 2)).save(out, "PNG")

    assert read_settings(out.getvalue()) == {}
    with pytest.raises(OSError, match="cannot identify"):
        read_settings(encode_image(DOT, "webp"))


@pytest.mark.parametrize("format_", ["jpeg", "webp"])
@given(picture=pictures(), compression=st.integers(0, 100))
def test_jpeg_and_webp_decode_to_the_right_size(
    format_: Format, picture: RawPicture, compression: int
) -> None:
    image = opened(encode_image(picture, format_, compression))

    assert (image.format, image.mode) == (format_.upper(), "RGB")
    assert image.size == (picture.width, picture.height)


@pytest.mark.parametrize("format_", ["jpeg", "webp"])
def test_a_lower_compression_value_gives_a_smaller_file(format_: Format) -> None:
    sizes = [len(encode_image(noise(), format_, compression)) for compression in (0, 30, 60, 100)]

    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize("format_", ["png", "jpeg", "webp"])
def test_a_picture_from_a_worker_and_one_of_pillow_are_written_alike(format_: Format) -> None:
    image = Image.frombytes("RGB", (32, 16), noise().rgb)

    assert encode_image(image, format_, 80) == encode_image(noise(), format_, 80)


def test_a_picture_is_read_upright_and_in_the_mode_that_pipelines_want(tmp_path: Path) -> None:
    turned = Image.new("RGBA", (40, 20), "red")
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned.save(tmp_path / "turned.png", exif=exif)

    picture = read_picture(tmp_path / "turned.png")
    mask = read_picture(tmp_path / "turned.png", "L")

    assert (picture.size, picture.mode) == ((20, 40), "RGB")
    assert (mask.size, mask.mode) == ((20, 40), "L")


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file.png"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidValue, match=r"file\.png: not a picture that can be read"):
        read_picture(path)
