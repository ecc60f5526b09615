"""Whatever bytes a client sends as a picture: it is read right, or refused before it costs much."""

import asyncio
import base64
import contextlib
import io
import os
import random
import struct
import subprocess
import sys
import zlib
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool.errors import (
    BodyTooLarge,
    ImageTooLarge,
    InvalidValue,
    Rejected,
    UnsupportedImage,
    UnsupportedParameter,
)
from carpool.media.uploads import Mode, from_url, read_data_url, read_image

MOST = 2048 * 2048
SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>'
)


def saved(image: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


def noise(width: int = 40, height: int = 20, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(5)
    rgba = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8))
    return rgba.convert(mode)


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png(width: int, height: int, *more: bytes, rows: int | None = None) -> bytes:
    """A grey PNG that has as many rows as said, whatever its header says."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(width + 1) * (height if rows is None else rows), 9)
    chunks = (chunk(b"IHDR", header), *more, chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def read(data: bytes, mode: Mode = "RGB") -> Image.Image:
    return read_image(data, max_pixels=MOST, mode=mode)


# What is read


@pytest.mark.parametrize("format_", ["PNG", "WEBP"])
def test_a_picture_keeps_its_pixels(format_: str) -> None:
    image = noise()

    read_back = read(saved(image, format_, **({"lossless": True} if format_ == "WEBP" else {})))

    assert (read_back.mode, read_back.tobytes()) == ("RGB", image.tobytes())


@pytest.mark.parametrize(
    ("mode", "format_"),
    [("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("RGBA", "WEBP"),
     ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "JPEG")],
)  # fmt: skip
@pytest.mark.parametrize("wanted", ["RGB", "RGBA", "L"])
def test_every_mode_becomes_the_one_that_is_wanted(mode: str, format_: str, wanted: Mode) -> None:
    image = read(saved(noise(mode=mode), format_), wanted)

    assert (image.mode, image.size) == (wanted, (40, 20))


def test_sixteen_bits_become_eight_and_stay_as_bright() -> None:
    deep = Image.fromarray(np.full((4, 4), 40_000, np.uint16))

    assert read(saved(deep)).getpixel((0, 0)) == (156, 156, 156)


def test_transparency_is_kept_where_it_is_wanted() -> None:
    clear = Image.new("RGBA", (4, 4), (9, 8, 7, 0))

    assert read(saved(clear), "RGBA").getpixel((0, 0)) == (9, 8, 7, 0)
    assert read(saved(clear)).getpixel((0, 0)) == (9, 8, 7)


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_set_upright_and_says_nothing_more(
    format_: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = orientation, "a camera"
    exif.get_ifd(0x8825)[1] = "N"  # where it was taken
    profile = b"\0" * 128

    image = read(saved(noise(), format_, exif=exif, icc_profile=profile, xmp=b"<x/>"))

    assert image.size == ((20, 40) if orientation > 4 else (40, 20))
    assert not image.info
    assert not image.getexif()


@pytest.mark.parametrize("size", [(40, 20), (1, 1), (3, 9)])
def test_an_interlaced_picture_is_read_whole_or_refused(size: tuple[int, int]) -> None:
    pixels = np.asarray(noise(*size, mode="L"))
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
              (0, 1, 1, 2)]  # fmt: skip
    rows = [row for x, y, dx, dy in passes for row in pixels[y::dy, x::dx] if row.size]
    packed = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 1)

    def laced(content: bytes) -> bytes:
        body = chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body

    assert read(laced(packed), "L").tobytes() == pixels.tobytes()
    with pytest.raises(UnsupportedImage, match="fewer rows than it states"):
        read(laced(packed[:-1]))


def test_the_first_picture_of_a_phones_jpeg_is_read() -> None:
    phones = saved(noise(), "MPO", save_all=True, append_images=[noise(8, 8)])

    assert read(phones).size == (40, 20)


# What is refused


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"", "no PNG, JPEG or WebP", id="empty"),
        pytest.param(b"picture", "no PNG, JPEG or WebP", id="text"),
        pytest.param(SVG, "no PNG, JPEG or WebP", id="svg"),
        *(
            pytest.param(saved(noise(), format_), "no PNG, JPEG or WebP", id=format_)
            for format_ in ("GIF", "TIFF", "BMP", "ICO", "PPM", "AVIF", "JPEG2000", "PCX", "TGA")
        ),
        pytest.param(
            saved(noise(), "GIF", save_all=True, append_images=[noise()]), "no PNG", id="gif frames"
        ),
        pytest.param(
            saved(noise(), save_all=True, append_images=[noise(mode="L").convert("RGB")]),
            "it has 2 frames: send a single picture",
            id="apng",
        ),
        pytest.param(
            saved(noise(), "WEBP", save_all=True, append_images=[Image.new("RGB", (40, 20))]),
            "it has 2 frames",
            id="animated webp",
        ),
        pytest.param(png(64, 64, rows=1), "fewer rows than it states", id="fewer rows than stated"),
        pytest.param(png(0, 64), "image cannot be read", id="no width"),
        pytest.param(
            png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(9_000_000), 9))),
            "damaged",
            id="text that unpacks to megabytes",
        ),
        pytest.param(
            png(8, 8, chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0))),
            "image cannot be read",
            id="two headers",
        ),
    ],
)  # fmt: skip
def test_what_is_no_single_whole_picture_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(UnsupportedImage, match=says) as refused:
        read(data)

    assert (refused.value.status, refused.value.code) == (400, "unsupported_image")
    assert refused.value.param == "image"
    assert len(refused.value.message) < 250
    assert "0x" not in refused.value.message


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_file_that_is_cut_short_is_refused(format_: str, share: float) -> None:
    data = saved(noise(), format_)

    with pytest.raises(UnsupportedImage):
        read(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    ("size", "most"), [((12_000, 12_000), MOST), ((30_000, 30_000), MOST), ((1, 100_000), 99_999)]
)
def test_a_picture_with_too_many_pixels_is_refused_unread(size: tuple[int, int], most: int) -> None:
    with pytest.raises(ImageTooLarge, match=f"the most is {most} in all") as refused:
        read_image(png(*size, rows=1), max_pixels=most, name="mask")

    assert (refused.value.status, refused.value.code) == (413, "image_too_large")
    assert refused.value.param == "mask"


def test_as_many_pixels_as_are_allowed_are_read() -> None:
    assert read_image(png(100, 10), max_pixels=1000).size == (100, 10)


BOMBS = """
import resource, sys, warnings
from carpool.errors import Rejected
from carpool.media.uploads import read_image
warnings.simplefilter("ignore")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_image(open(path, "rb").read(), max_pixels=1 << 22)
    except Rejected as error:
        pass
    else:
        sys.exit(path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_take_no_memory(tmp_path: Any) -> None:
    bombs = {
        "png": png(6000, 6000),
        "jpeg": saved(Image.new("L", (6000, 6000)), "JPEG"),
        "webp": saved(Image.new("RGB", (6000, 6000)), "WEBP", lossless=True, method=0),
    }
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)

    done = subprocess.run(
        [sys.executable, "-c", BOMBS, *(str(tmp_path / name) for name in bombs)],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    grown_kib = int(done.stdout)
    assert grown_kib < 16_000


def test_a_jpeg_that_draws_itself_again_and_again_is_refused() -> None:
    data = saved(noise(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")  # its last scan, once more and once more
    bomb = data[:last] + data[last:-2] * 5000 + data[-2:]

    with pytest.raises(UnsupportedImage, match="at most 100 scans"):
        read(bomb)
    assert read(data).size == (40, 20)


@given(
    st.sampled_from(["PNG", "JPEG", "WEBP"]),
    st.integers(0, 2**32),
    st.sampled_from(["flip", "cut", "insert", "swap"]),
)
def test_a_damaged_file_is_read_or_refused_but_never_an_error_of_ours(
    format_: str, seed: int, how: Literal["flip", "cut", "insert", "swap"]
) -> None:
    rng = random.Random(seed)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = bytearray(saved(noise(), format_, exif=exif))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), rng.choice([64, 256, len(data)])))
        if how == "flip":
            data[at] = rng.randrange(256)
        elif how == "cut":
            del data[at : at + rng.randint(1, 9)]
        elif how == "insert":
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            data[at : at + 4] = struct.pack(">I", rng.choice([0, 1, 2**31, 2**32 - 1]))

    with contextlib.suppress(Rejected):
        assert read(bytes(data)).mode == "RGB"


@pytest.mark.parametrize("lost", [1, 8, 12, 16, 20])
def test_a_png_without_its_end_is_cut_short_though_every_row_is_there(lost: int) -> None:
    whole = png(40, 20)

    assert read(whole + b"more").size == (40, 20)
    with pytest.raises(UnsupportedImage, match="image cannot be read"):
        read(whole[:-lost])


# data: URLs


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def fetched(url: str, **options: Any) -> Image.Image:
    return asyncio.run(from_url(url, **{"max_pixels": MOST, **options}))


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "IMAGE/PNG", "image/png;x=y"])
def test_a_data_url_is_read_by_what_it_holds(kind: str) -> None:
    image = fetched(data_url(saved(noise()), kind))

    assert image.tobytes() == noise().tobytes()


def test_the_mode_and_the_limits_hold_for_urls_too() -> None:
    url = data_url(saved(noise(mode="RGBA")))

    assert fetched(url, mode="RGBA").mode == "RGBA"
    with pytest.raises(ImageTooLarge, match="mask has 40x20 pixels: the most is 100 in all"):
        fetched(url, max_pixels=100, name="mask")
    with pytest.raises(BodyTooLarge, match="image is larger than 100 bytes"):
        fetched(url, max_bytes=100)


@given(st.binary(max_size=40))
def test_the_size_of_a_data_url_is_that_of_its_bytes(data: bytes) -> None:
    assert read_data_url(data_url(data), max_bytes=len(data)) == data
    with pytest.raises(BodyTooLarge):
        read_data_url(data_url(data + b"1234"), max_bytes=len(data))


@pytest.mark.parametrize(
    "url",
    ["", "x", "data:", "data:,", "data:image/png,abc", "data:text/html;base64,aGk=",
     "data:image/png;base64,###", "data:image/png;base64,aGk", "data:image/png;base64,\u0660",
     "data:image/png;base64", "data:" + "x" * 1000, "file:///etc/passwd", "/etc/passwd",
     "ftp://127.0.0.1/x.png", "gopher://x", "jar:http://x!/", "\0http://x", " http://x", "//x/y",
     "javascript:1", "blob:http://x", "\ud800"],
)  # fmt: skip
def test_what_is_no_picture_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        fetched(url, allow_remote=True)

    assert refused.value.param == "image"
    assert len(refused.value.message) < 160


def test_a_url_of_another_kind_is_told_which_kinds_are_read() -> None:
    for allowed, rule in ((True, "... or http(s)://..."), (False, "base64,...")):
        with pytest.raises(InvalidValue) as refused:
            fetched("file:///etc/passwd", allow_remote=allowed)

        assert refused.value.message.startswith('image="file:///etc/passwd": must be data:image/')
        assert refused.value.message.endswith(rule)


def test_no_url_is_fetched_unless_the_server_allows_it() -> None:
    for url in ("http://127.0.0.1:1/x.png", "HTTPS://example.com/x.png"):
        with pytest.raises(UnsupportedParameter, match="this server does not fetch"):
            fetched(url)
