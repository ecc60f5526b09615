"""Pictures in: bytes that a client sent become an image that a pipeline may see, or are refused.

What a file says of itself is read before anything is decoded, and believed only to refuse it.
Nothing of the file is kept but its pixels.
"""

import asyncio
import base64
import binascii
import io
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from carpool.errors import (
    BodyTooLarge,
    ImageTooLarge,
    InvalidValue,
    Rejected,
    UnsupportedImage,
    UnsupportedParameter,
    show,
)
from carpool.media import remote

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_BYTES = 50 << 20  # of one file, as OpenAI has it
MOST_SCANS = 100  # of a JPEG; each may draw the whole picture again, from a few bytes
_PASSES = (  # of an interlaced PNG: the first column and row, and the steps to the next ones
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)
)  # fmt: skip
_BANDS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the colour type of a PNG
_DATA_URL = "data:image/png;base64,..."

Mode = Literal["RGB", "RGBA", "L"]


def read_image(
    data: bytes, *, max_pixels: int, mode: Mode = "RGB", name: str = "image"
) -> Image.Image:
    """Decode a picture: upright, of one mode, with nothing beside its pixels.

    Args:
        data: a whole PNG, JPEG or WebP file.
        max_pixels: width times height; checked before it is decoded.
        mode: of the result; 16 bits become 8, and transparency is left out but for "RGBA".
        name: of the parameter, for messages.

    Raises:
        UnsupportedImage: another format, several frames, damaged or cut short.
        ImageTooLarge: more than `max_pixels`.
    """
    if data.count(b"\xff\xda") > MOST_SCANS and data.startswith(b"\xff\xd8"):
        raise _refused(name, f"a JPEG may have at most {MOST_SCANS} scans: save it anew", None)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                seen = f"{name} has {width}x{height} pixels"
                raise ImageTooLarge(f"{seen}: the most is {max_pixels} in all", param=name)
            # a JPEG of a phone may carry further pictures (MPO): the first is what it shows
            frames = getattr(image, "n_frames", 1) if image.format in FORMATS else 1
            if frames != 1:
                raise _refused(name, f"it has {frames} frames: send a single picture", None)
            if image.format == "PNG" and not _is_whole(data):
                raise _refused(name, "it has fewer rows than it states, or no end", None)
            return _plain(image, mode)
    except Rejected:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        said = f"{name} has too many pixels: the most is {max_pixels} in all"
        raise ImageTooLarge(said, param=name) from error
    except UnidentifiedImageError as error:
        rule = "it is no PNG, JPEG or WebP, whatever its name says: save it as one of these"
        raise _refused(name, rule, error) from error
    except Exception as error:  # decoders raise what they like: SyntaxError, struct.error, ...
        raise _refused(name, "the file is damaged or cut short", error) from error


def read_data_url(url: str, *, max_bytes: int = MOST_BYTES, name: str = "image") -> bytes:
    """The bytes of a `data:` URL in base64; their type is told by themselves, not by the URL.

    Raises:
        InvalidValue: it is no such URL.
        BodyTooLarge: it holds more than `max_bytes`.
    """
    head, comma, _ = url[:200].partition(",")
    if not comma or head[:11].lower() != "data:image/" or not head.lower().endswith(";base64"):
        raise InvalidValue(f"{name}={show(_cut(url))}: must be {_DATA_URL}", param=name)
    if (len(url) - len(head)) * 3 // 4 > max_bytes + 3:
        raise BodyTooLarge(f"{name} is larger than {max_bytes} bytes", param=name)
    try:
        return base64.b64decode(url[len(head) + 1 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidValue(f"{name}={show(_cut(url))}: {error}", param=name) from error


async def from_url(
    url: str,
    *,
    max_pixels: int,
    max_bytes: int = MOST_BYTES,
    allow_remote: bool = False,
    mode: Mode = "RGB",
    name: str = "image",
) -> Image.Image:
    """The picture at a URL: `data:`, or `http(s):` where the server allows it.

    Decodes on another thread.

    Raises:
        Rejected, BodyTooLarge: as `read_image`, `read_data_url` and `remote.fetch` do.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        data = read_data_url(url, max_bytes=max_bytes, name=name)
    elif scheme not in ("http", "https"):
        rule = f"{_DATA_URL} or http(s)://..." if allow_remote else _DATA_URL
        raise InvalidValue(f"{name}={show(_cut(url))}: must be {rule}", param=name)
    elif not allow_remote:
        raise UnsupportedParameter(
            f"{name} is a URL, which this server does not fetch (--allow-remote-media): send the "
            f"picture itself, as {_DATA_URL}",
            param=name,
        )
    else:
        data = await remote.fetch(url, max_bytes=max_bytes, name=name)
    return await asyncio.to_thread(read_image, data, max_pixels=max_pixels, mode=mode, name=name)


def read_picture(path: Path, *, is_mask: bool = False) -> Image.Image:
    """A picture from the user's own file, upright: RGB, or 8-bit grey for a mask.

    Raises:
        InvalidValue: it is no picture that can be read.
    """
    try:
        with Image.open(path) as image:
            return _plain(image, "L" if is_mask else "RGB")
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise InvalidValue(f"{path}: not a picture that can be read: {error}") from error


def _plain(image: Image.Image, mode: Mode) -> Image.Image:
    """The pixels alone."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P":  # straight to RGB, Pillow warns of colours that are transparent
        image = image.convert("RGBA")
    plain = image.convert(mode)
    plain.info = {}
    return plain


def _is_whole(png: bytes) -> bool:
    """Whether it ends, with as many bytes of pixels as its header says. Pillow does not mind."""
    width, height, depth, colour, _, _, is_laced = struct.unpack(">IIBBBBB", png[16:29])
    due_bytes = 0
    for left, top, across, down in _PASSES if is_laced else ((0, 0, 1, 1),):
        columns, rows = -((left - width) // across), -((top - height) // down)
        if columns > 0:
            due_bytes += max(rows, 0) * (1 + -(-columns * depth * _BANDS[colour] // 8))
    packed, at, has_end = list[bytes](), 8, False
    while at < len(png) and not has_end:
        size, name = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        if name == b"IDAT":
            packed.append(png[at + 8 : at + 8 + size])
        at += size + 12
        has_end = name == b"IEND" and at <= len(png)
    return (
        has_end and len(zlib.decompressobj().decompress(b"".join(packed), due_bytes)) == due_bytes
    )


def _refused(name: str, rule: str, error: Exception | None) -> UnsupportedImage:
    why = (
        f" ({error})" if isinstance(error, (OSError, ValueError)) and "0x" not in str(error) else ""
    )
    return UnsupportedImage(f"{name} cannot be read: {rule}{why[:100]}", param=name)


def _cut(url: str) -> str:
    return url if len(url) <= 40 else url[:37] + "..."
