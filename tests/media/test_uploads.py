"""Whatever bytes a client sends as a picture: it is read right, or refused before it costs much."""

import asyncio
import base64
import contextlib
import io
import logging
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool import errors
from carpool.media.reader import MOST_PIXELS, ImageIntake, PictureReader
from carpool.media.uploads import Mode, decode, decode_cost, parse, read_image

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
    with pytest.raises(errors.UnsupportedImage, match="fewer rows than it states"):
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
            png(8, 8, chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0))),
            "image cannot be read",
            id="two headers",
        ),
    ],
)  # fmt: skip
def test_what_is_no_single_whole_picture_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(errors.UnsupportedImage, match=says) as refused:
        read(data)

    assert (refused.value.status, refused.value.code) == (400, "unsupported_image")
    assert refused.value.param == "image"
    assert len(refused.value.message) < 250
    assert "0x" not in refused.value.message


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_file_that_is_cut_short_is_refused(format_: str, share: float) -> None:
    data = saved(noise(), format_)

    with pytest.raises(errors.UnsupportedImage):
        read(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    ("size", "most"), [((12_000, 12_000), MOST), ((30_000, 30_000), MOST), ((1, 100_000), 99_999)]
)
def test_a_picture_with_too_many_pixels_is_refused_unread(size: tuple[int, int], most: int) -> None:
    with pytest.raises(errors.ImageTooLarge, match=f"the limit is {most} in all") as refused:
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


# What is left for the decoder


def riff(*chunks: tuple[bytes, bytes], more: bytes = b"") -> bytes:
    """A WebP file of these chunks, and others that are packed already."""
    parts = (
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
        for name, data in chunks
    )
    body = b"WEBP" + b"".join(parts) + more
    return b"RIFF" + struct.pack("<I", len(body)) + body


def riff_chunks(webp: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 12
    while at < len(webp):
        name, size = struct.unpack_from("<4sI", webp, at)
        found.append((name, webp[at + 8 : at + 8 + size]))
        at += 8 + size + size % 2
    return found


def segment(marker: int, content: bytes) -> bytes:
    """A segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def exif_of(entries: int, orientation: int = 6) -> bytes:
    """EXIF with as many broken tags, and an orientation at the end."""
    broken = b"".join(struct.pack(">HHII", 0x9000 + i, 5, 9, 2**31) for i in range(entries))
    turned = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"MM\0*" + struct.pack(">IH", 8, entries + 1) + broken + turned + bytes(4)


ZEROS = zlib.compress(bytes(60_000_000), 9)
TAGS = exif_of(2000)
WEBP = riff_chunks(saved(noise(), "WEBP", lossless=True))
EXTENDED = b"\x2c\0\0\0" + struct.pack("<I", 39)[:3] + struct.pack("<I", 19)[:3]
JPEG = saved(noise(), "JPEG")
LOADED = {
    "png zTXt": png(40, 20, *[chunk(b"zTXt", b"a\0\0" + ZEROS)] * 9),
    "png iTXt": png(40, 20, *[chunk(b"iTXt", b"a\0\1\0\0\0" + ZEROS)] * 9),
    "png iCCP": png(40, 20, chunk(b"iCCP", b"a\0\0" + ZEROS)),
    "png tEXt": png(40, 20, *[chunk(b"tEXt", b"a\0" + b"x" * 1000)] * 9000),
    "png eXIf": png(40, 20, chunk(b"eXIf", TAGS)),
    "png unknown": png(40, 20, chunk(b"xyZz", bytes(1_000_000))),
    "jpeg Exif": JPEG[:2] + segment(0xE1, b"Exif\0\0" + TAGS) * 9 + JPEG[2:],
    "jpeg MPF": JPEG[:2] + segment(0xE2, b"MPF\0" + TAGS) + JPEG[2:],
    "jpeg ICC": JPEG[:2] + segment(0xE2, b"ICC_PROFILE\0\1\1" + ZEROS[:9999]) * 99 + JPEG[2:],
    "jpeg comments": JPEG[:2] + segment(0xFE, b"x" * 60_000) * 99 + JPEG[2:],
    "jpeg Photoshop": JPEG[:2] + segment(0xED, b"Photoshop 3.0\x008BIM" + TAGS) + JPEG[2:],
    "webp": riff((b"VP8X", EXTENDED), (b"ICCP", ZEROS), *WEBP, (b"EXIF", TAGS), (b"XMP ", ZEROS)),
}


@pytest.mark.parametrize("data", LOADED.values(), ids=LOADED)
def test_metadata_is_left_out_before_a_decoder_sees_it(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings are errors here, so none is given either."""
    caplog.set_level(logging.DEBUG)

    container = parse(data, max_pixels=MOST)

    assert container.orientation == (6 if TAGS in data and b"MPF" not in data else 1) or (
        b"Photoshop" in data
    )
    assert len(container.data) < 4000
    assert not caplog.records
    image = decode(container, mode="RGB")
    assert not caplog.records
    expected = read(png(40, 20)) if data.startswith(b"\x89PNG") else noise()
    if container.orientation == 6:
        expected = expected.transpose(Image.Transpose.ROTATE_270)
    if not data.startswith(b"\xff\xd8"):
        assert image.tobytes() == expected.tobytes()
    assert image.size == expected.size


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("xmp", ['tiff:Orientation="8"', "<tiff:Orientation>8</tiff:Orientation>"])
def test_xmp_says_which_way_is_up_where_exif_does_not(format_: str, xmp: str) -> None:
    if format_ == "PNG":
        content = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp.encode()
        data = png(40, 20, chunk(b"iTXt", content))
    else:
        data = saved(noise(), format_, xmp=xmp.encode())

    assert parse(data, max_pixels=MOST).orientation == 8
    assert read(data).size == (20, 40)


COSTLY = {
    "jpeg of fill bytes": (JPEG[:2] + b"\xff" * 9_000_000 + JPEG[2:], "bytes of padding"),
    "jpeg of junk": (JPEG[:20] + b"\0" * 9_000_000 + JPEG[20:], "bytes of padding"),
    "jpeg of stuffed bytes": (JPEG[:2] + b"\xff\0" * 9_000_000 + JPEG[2:], "bytes of padding"),
    "jpeg whose scan is filled": (JPEG[:-2] + b"\xff" * 9_000_000 + JPEG[-2:], "of padding"),
    "jpeg of comments": (JPEG[:2] + segment(0xFE, b"") * 2_000_000 + JPEG[2:], "20000 parts"),
    "jpeg of restarts": (JPEG[:2] + b"\xff\xd0" * 4_000_000 + JPEG[2:], "20000 parts"),
    "png of texts": (png(40, 20, chunk(b"tEXt", b"") * 700_000), "20000 parts"),
    "png of empty rows": (png(40, 20, chunk(b"IDAT", b"") * 700_000), "20000 parts"),
    "png palette": (png(40, 20, chunk(b"PLTE", bytes(9_000_000))), "damaged"),
    "png transparency": (png(40, 20, chunk(b"tRNS", bytes(9_000_000))), "damaged"),
    "webp of chunks": (riff(*WEBP, more=b"abcd\0\0\0\0" * 1_000_000), "20000 parts"),
}


@pytest.mark.parametrize(("data", "says"), COSTLY.values(), ids=COSTLY)
def test_what_is_made_to_cost_much_is_refused_before_a_decoder_sees_it(
    data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "open", None)

    with pytest.raises(errors.UnsupportedImage, match=says):
        read(data)


def test_rows_that_unpack_to_more_than_the_picture_are_not_unpacked() -> None:
    header = struct.pack(">IIBBBBB", 40, 20, 8, 0, 0, 0, 0)
    bomb = chunk(b"IHDR", header) + chunk(b"IDAT", ZEROS) + chunk(b"IEND", b"")
    tracemalloc.start()
    try:
        assert read(b"\x89PNG\r\n\x1a\n" + bomb).size == (40, 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 4 << 20


PHOTO = Image.radial_gradient("L").resize((3000, 2000)).convert("RGB")
TURNED = Image.Exif()
TURNED[0x0112] = 6


def kinds() -> dict[str, tuple[bytes, Mode]]:
    """Photographs in every kind of file. Made for the test alone: they take a second."""
    return {
        "png": (saved(PHOTO, compress_level=1), "RGB"),
        "png rgba": (saved(PHOTO.convert("RGBA"), compress_level=1), "RGB"),
        "png rgba kept": (saved(PHOTO.convert("RGBA"), compress_level=1), "RGBA"),
        "png grey": (saved(PHOTO.convert("L"), compress_level=1), "RGB"),
        "png palette": (saved(PHOTO.quantize(), compress_level=1), "RGB"),
        "png 16 bit": (saved(Image.fromarray(np.zeros((2000, 3000), np.uint16))), "RGB"),
        "jpeg": (saved(PHOTO, "JPEG"), "RGB"),
        "jpeg turned": (saved(PHOTO, "JPEG", exif=TURNED), "RGB"),
        "jpeg progressive": (saved(PHOTO, "JPEG", progressive=True, subsampling=0), "RGB"),
        "jpeg cmyk": (saved(PHOTO.convert("CMYK"), "JPEG"), "RGB"),
        "webp": (saved(PHOTO, "WEBP", method=0), "RGB"),
        "webp lossless": (saved(PHOTO.convert("RGBA"), "WEBP", lossless=True, method=0), "RGB"),
    }


# glibc else learns from what is freed which blocks to keep: by chance, 7 MB more or less
STEADY = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
MEASURED = """
import os, sys
from pathlib import Path
from carpool.media.uploads import decode, decode_cost, parse

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

decode(parse(Path(sys.argv[1]).read_bytes(), max_pixels=9), mode="RGB")  # libraries are loaded
for path, mode, *fitted in map(str.split, sys.stdin.read().splitlines()):
    if os.fork():  # each with memory that nobody has used before
        os.wait()
        continue
    size = tuple(map(int, fitted)) or None
    container = parse(Path(path).read_bytes(), max_pixels=10**7)
    before = peak()
    decode(container, mode=mode, fitted=size)
    cost = decode_cost(container, mode, fitted=size)
    print(path, *fitted, peak() - before, cost, flush=True)
    os._exit(0)
"""


def test_a_picture_takes_no_more_memory_than_was_said_before(tmp_path: Any) -> None:
    (tmp_path / "small").write_bytes(png(3, 3))
    lines, known = [], kinds()
    for name, (data, mode) in known.items():
        path = tmp_path / name.replace(" ", "-")
        path.write_bytes(data)
        turned = "500 750" if "turned" in name else "750 500"
        lines += [f"{path} {mode}", f"{path} {mode} {turned}"]

    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "small")], input="\n".join(lines),
        capture_output=True, text=True, check=True, env={**os.environ, **STEADY},
    )  # fmt: skip

    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 2 * len(known)
    for *which, took, said in found:
        assert int(took) < int(said) + (6 << 20), which
        assert int(said) < 2 * int(took), which  # and that is not just any number


@pytest.mark.parametrize(
    ("mode", "side", "format_", "options"),
    [
        ("RGBA", 5656, "PNG", {"compress_level": 1}),
        ("RGB", 4000, "WEBP", {"lossless": True, "method": 0}),
        ("RGB", 5600, "JPEG", {"progressive": True, "subsampling": 0}),
    ],
)
def test_a_picture_that_takes_too_much_memory_is_refused_undecoded(
    mode: str, side: int, format_: str, options: dict[str, Any]
) -> None:
    data = saved(Image.new(mode, (side, side)), format_, **options)
    container = parse(data, max_pixels=MOST_PIXELS)

    with pytest.raises(
        errors.ImageTooLarge, match=r"to decode as .*: the limit is 192 MiB"
    ) as refused:
        decode_cost(container, "RGB", "mask", (512, 512))

    assert refused.value.param == "mask"


def test_a_photograph_of_the_largest_size_is_taken() -> None:
    for data in (
        saved(Image.new("RGB", (6000, 5333)), "JPEG"),
        saved(Image.new("RGB", (6000, 5333)), compress_level=1),
        saved(Image.fromarray(np.zeros((5333, 6000), np.uint16))),
    ):
        decode_cost(parse(data, max_pixels=MOST_PIXELS), "RGB", fitted=(2048, 2048))


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_fitted_as_it_is_seen(format_: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(PHOTO.resize((300, 100)), format_, exif=exif)
    upright = read(data)
    fitted = (30, 90) if orientation > 4 else (90, 30)

    small = decode(parse(data, max_pixels=MOST), mode="RGB", fitted=fitted)

    assert small.size == fitted
    gap = np.asarray(small).astype(int) - np.asarray(upright.resize(fitted))
    assert abs(gap).max() <= 1  # rounded by rows first, or by columns


def test_a_jpeg_that_draws_itself_again_and_again_is_refused() -> None:
    data = saved(noise(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")  # its last scan, once more and once more
    bomb = data[:last] + data[last:-2] * 5000 + data[-2:]

    with pytest.raises(errors.UnsupportedImage, match="at most 100 scans"):
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

    with contextlib.suppress(errors.Rejected):
        assert read(bytes(data)).mode == "RGB"


@pytest.mark.parametrize("lost", [1, 8, 12, 16, 20])
def test_a_png_without_its_end_is_cut_short_though_every_row_is_there(lost: int) -> None:
    whole = png(40, 20)

    assert read(whole + b"more").size == (40, 20)
    with pytest.raises(errors.UnsupportedImage, match="image cannot be read"):
        read(whole[:-lost])


# data: URLs


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def fetched(
    url: str, *, allow_remote: bool = False, mode: Mode = "RGB", name: str = "image"
) -> Image.Image:
    async def read() -> Image.Image:
        intake = ImageIntake(PictureReader(allow_remote=allow_remote))
        file = await intake.open(url, name)
        return await intake.decode(file, name, mode=mode)

    return asyncio.run(read())


def test_the_mode_and_the_limits_hold_for_urls_too() -> None:
    url = data_url(saved(noise(mode="RGBA")))

    assert fetched(url, mode="RGBA").mode == "RGBA"
    with pytest.raises(
        errors.ImageTooLarge, match="mask has 9000x9000 pixels: the limit is 320000"
    ):
        fetched(data_url(png(9000, 9000, rows=1)), name="mask")
    with pytest.raises(errors.BodyTooLarge, match="image is larger than 52428800 bytes"):
        fetched("data:image/png;base64," + "A" * (70 << 20))


@pytest.mark.parametrize(
    "url",
    ["", "x", "data:", "data:,", "data:image/png,abc", "data:text/html;base64,aGk=",
     "data:image/png;base64,###", "data:image/png;base64,aGkaB", "data:image/png;base64,\u0660",
     "data:image/png;base64", "data:" + "x" * 1000, "file:///etc/passwd", "/etc/passwd",
     "ftp://127.0.0.1/x.png", "gopher://x", "jar:http://x!/", "\0http://x", " http://x", "//x/y",
     "javascript:1", "blob:http://x", "\ud800"],
)  # fmt: skip
def test_what_is_no_picture_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(errors.InvalidValue) as refused:
        fetched(url, allow_remote=True)

    assert refused.value.param == "image"
    assert len(refused.value.message) < 160


def test_a_url_of_another_kind_is_told_which_kinds_are_read() -> None:
    for allowed, rule in ((True, "... or http(s)://..."), (False, "base64,...")):
        with pytest.raises(errors.InvalidValue) as refused:
            fetched("file:///etc/passwd", allow_remote=allowed)

        assert refused.value.message.startswith('image="file:///etc/passwd": must be data:image/')
        assert refused.value.message.endswith(rule)


def test_no_url_is_fetched_unless_the_server_allows_it() -> None:
    for url in ("http://127.0.0.1:1/x.png", "HTTPS://example.com/x.png"):
        with pytest.raises(errors.UnsupportedParameter, match="this server does not fetch"):
            fetched(url)
