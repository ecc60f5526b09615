"""Pictures in: bytes that a client sent become an image that a pipeline may see, or are refused.

What a file says of itself is read before anything is decoded, and believed only to refuse it.
Nothing of the file is kept but its pixels.
"""

import binascii
import hashlib
import io
import logging
import math
import struct
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from carpool.errors import (
    BodyTooLarge,
    ImageTooLarge,
    InvalidValue,
    UnsupportedImage,
    show,
)
from carpool.media import jpeg, png, webp
from carpool.media.container import CUT_SHORT, Container, Unreadable

MOST_BYTES = 50 << 20  # of one file, as OpenAI has it
MOST_DECODED_BYTES = 192 << 20  # that one picture may take with all copies
DATA_URL = "data:image/png;base64,..."
_WALKS = (
    (png.SIGNATURE, png.walk),
    (jpeg.SIGNATURE, jpeg.walk),
    (webp.SIGNATURE, webp.walk),
)
_NONE = "it is no PNG, JPEG or WebP, whatever its name says: save it as one of these"
_PIECE = 1 << 18  # letters of base64; between two, other threads may run
_BAND = 256  # rows of 16 bits
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Mode = Literal["RGB", "RGBA", "L"]
Size = tuple[int, int]  # width, height

logging.getLogger("PIL").setLevel(logging.WARNING)  # at DEBUG it repeats what files say


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
    return decoded(walked(data, max_pixels=max_pixels, name=name), mode=mode, name=name)


def walked(data: bytes, *, max_pixels: int, name: str = "image") -> Container:
    """See what a file holds before it is decoded.

    Raises:
        UnsupportedImage, ImageTooLarge: as for `read_image`.
    """
    walk = next((walk for signature, walk in _WALKS if signature.match(data)), None)
    try:
        if walk is None:
            raise Unreadable(_NONE)
        container = walk(data)
    except Unreadable as error:
        raise _refused(name, str(error), None) from error
    except (struct.error, IndexError) as error:  # it ends in the middle of something
        raise _refused(name, CUT_SHORT, None) from error
    if math.prod(container.size) > max_pixels:
        seen = f"{name} has {_by(container.size)} pixels"
        raise ImageTooLarge(f"{seen}: the most is {max_pixels} in all", param=name)
    if container.frames != 1:
        rule = f"it has {container.frames} frames: send a single picture"
        raise _refused(name, rule, None)
    return container


def cost_of(container: Container, mode: Mode, fitted: Size | None = None) -> int:
    """Bytes that `decoded` takes at most, beside the file."""
    pixels, left = math.prod(container.size), math.prod(fitted or container.size)
    copies = {mode: 0, "P": 8, "I;16": 1, "L": 0}.get(container.mode, 4)
    if mode == "RGBA":
        copies = max(copies, 4)  # to be resized, its colours are multiplied by it
    halfway = math.sqrt(pixels * left) if left < pixels else 0  # resized in width alone
    after = pixels * (container.pixel_bytes + copies) + 4 * halfway + 4 * left
    return int(max(pixels * container.peak_bytes, after))


def check_cost(container: Container, cost: int, name: str) -> None:
    """Refuse a picture that takes too much memory.

    Raises:
        ImageTooLarge: it does.
    """
    if cost > MOST_DECODED_BYTES:
        raise ImageTooLarge(
            f"{name} has {_by(container.size)} pixels, and takes {cost >> 20} MiB to decode as "
            f"{container.format}: the most is {MOST_DECODED_BYTES >> 20} MiB, make it smaller",
            param=name,
        )


def decoded(
    container: Container, *, mode: Mode, name: str = "image", fitted: Size | None = None
) -> Image.Image:
    """Decode a picture that has been walked through. Takes its time.

    Args:
        fitted: size of the result; None: its own.

    Raises:
        UnsupportedImage: it is damaged or cut short.
    """
    try:
        if container.format == "PNG":
            png.check_rows(container)
        return _decoded(container, mode, fitted)
    except UnidentifiedImageError as error:
        raise _refused(name, _NONE, error) from error
    except Unreadable as error:
        raise _refused(name, str(error), None) from error
    except Exception as error:  # decoders raise what they like: SyntaxError, struct.error, ...
        raise _refused(name, CUT_SHORT, error) from error


def _decoded(container: Container, mode: Mode, fitted: Size | None) -> Image.Image:
    with Image.open(io.BytesIO(container.data), formats=(container.format,)) as file:
        if file.size != (container.width, container.height):
            raise Unreadable(CUT_SHORT)
        file.load()
        image = _eight_bits(file)
        if (image.mode, mode) != ("L", "RGB"):  # that is cheaper once it is small
            image = _converted(image, mode)
        width, height = fitted or container.size
        stored = (height, width) if container.orientation > 4 else (width, height)
        if image.size != stored:
            image = image.resize(stored)
        if container.orientation > 1:
            image = image.transpose(_UPRIGHT[container.orientation])
        image = _converted(image, mode)
        if image is file:
            image = image.copy()
    image.info = {}
    return image


def read_data_url(
    url: str | memoryview, *, max_bytes: int = MOST_BYTES, name: str = "image"
) -> bytes:
    """The bytes of a `data:` URL in base64; their type is told by themselves, not by the URL.

    Raises:
        InvalidValue: it is no such URL.
        BodyTooLarge: it holds more than `max_bytes`.
    """
    head, comma, _ = _letters(url, 0, 200).partition(b",")
    kind, start = head.lower(), len(head) + 1
    if not comma or kind[:11] != b"data:image/" or not kind.endswith(b";base64"):
        raise InvalidValue(f"{name}={show(cut(url))}: must be {DATA_URL}", param=name)
    if (len(url) - start) * 3 // 4 > max_bytes + 3:
        raise BodyTooLarge(f"{name} is larger than {max_bytes} bytes", param=name)
    data = io.BytesIO()
    try:
        for at in range(start, len(url), _PIECE):
            piece = binascii.a2b_base64(_letters(url, at, _PIECE), strict_mode=True)
            if at + _PIECE < len(url) and len(piece) != _PIECE * 3 // 4:
                raise ValueError("Excess data after padding")
            data.write(piece)
    except ValueError as error:
        raise InvalidValue(f"{name}={show(cut(url))}: {error}", param=name) from error
    return data.getvalue()  # not a copy


def digest_of(sent: bytes | str | memoryview) -> str:
    """What tells a picture from others, as it was sent. Takes its time."""
    digest = hashlib.sha256()
    for at in range(0, len(sent), _PIECE):
        digest.update(
            _letters(sent, at, _PIECE) if isinstance(sent, str) else sent[at : at + _PIECE]
        )
    return digest.hexdigest()


def _letters(url: str | memoryview, start: int, size: int) -> bytes:
    """A piece of a URL: a copy of all of it would keep other threads waiting."""
    piece = url[start : start + size]
    return piece.encode(errors="replace") if isinstance(piece, str) else bytes(piece)


def read_picture(path: Path, *, is_mask: bool = False) -> Image.Image:
    """A picture from the user's own file, upright: RGB, or 8-bit grey for a mask.

    Raises:
        InvalidValue: it is no picture that can be read.
    """
    try:
        with Image.open(path) as image:
            upright = _eight_bits(ImageOps.exif_transpose(image))
            plain = _converted(upright, "L" if is_mask else "RGB")
            plain.info = {}
            return plain
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise InvalidValue(f"{path}: not a picture that can be read: {error}") from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits as 8, of which Pillow would take the lower ones; any other as it is."""
    if not image.mode.startswith("I"):
        return image
    grey = Image.new("L", image.size)
    for top in range(0, image.height, _BAND):
        box = (0, top, image.width, min(top + _BAND, image.height))
        band = np.asarray(image.crop(box)) >> 8
        grey.paste(Image.fromarray(band.astype(np.uint8)), box)
    return grey


def _converted(image: Image.Image, mode: Mode) -> Image.Image:
    if image.mode == "P":  # straight to RGB, Pillow warns of colours that are transparent
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _refused(name: str, rule: str, error: Exception | None) -> UnsupportedImage:
    why = (
        f" ({error})" if isinstance(error, (OSError, ValueError)) and "0x" not in str(error) else ""
    )
    return UnsupportedImage(f"{name} cannot be read: {rule}{why[:100]}", param=name)


def cut(url: str | memoryview) -> str:
    """A URL as a message may repeat it."""
    start = url[:40] if isinstance(url, str) else bytes(url[:40]).decode(errors="replace")
    return start if len(url) <= 40 else start[:37] + "..."


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
