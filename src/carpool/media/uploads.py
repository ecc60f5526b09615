"""Decode pictures of clients, or refuse them.

The headers of a file are read before it is decoded, and trusted only for refusing it. Only the
pixels of the file are kept.
"""

import binascii
import hashlib
import io
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from carpool.errors import BodyTooLarge, ImageTooLarge, InvalidValue, UnsupportedImage
from carpool.media import container
from carpool.media.container import CUT_SHORT, UNKNOWN, Container, Unreadable
from carpool.request.images import Size

MOST_BYTES = 50 << 20  # limit for one file, the same as OpenAI's
MOST_DECODED_BYTES = 192 << 20  # limit for one picture and its copies
DATA_URL = "data:image/png;base64,..."
_PIECE = 1 << 18  # base64 letters per step; other threads may run in between
_KINDS = (b"data:image/", b"data:application/octet-stream;", b"data:;")  # the signature decides
_URL_SAFE, _BLANKS = bytes.maketrans(b"-_", b"+/"), b" \t\r\n\f\v"
_BAND = 256  # rows of 16 bits
_UPRIGHT = (  # index: EXIF orientation - 2
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.ROTATE_180,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)

Mode = Literal["RGB", "RGBA", "L"]

logging.getLogger("PIL").setLevel(logging.WARNING)  # at DEBUG it logs the content of files


def read_image(
    data: bytes, *, max_pixels: int, mode: Mode = "RGB", name: str = "image"
) -> Image.Image:
    """Decode a picture: upright, in one mode, only its pixels.

    Args:
        data: a complete PNG, JPEG or WebP file.
        max_pixels: limit for width times height; checked before decoding.
        mode: mode of the result; 16 bits become 8; only "RGBA" keeps transparency.
        name: name of the parameter, for messages.

    Raises:
        UnsupportedImage: another format, several frames, damaged or truncated.
        ImageTooLarge: more than `max_pixels`.
    """
    return decode(parse(data, max_pixels=max_pixels, name=name), mode=mode, name=name)


def parse(data: bytes, *, max_pixels: int, name: str = "image") -> Container:
    """Read the headers of a file; raises as `read_image`."""
    try:
        parsed = container.parse(data)
        width, height = parsed.size
        if width * height > max_pixels:
            sight = f"{name} has {width}x{height} pixels"
            raise ImageTooLarge(f"{sight}: the limit is {max_pixels} in all", param=name)
        if parsed.frames != 1:
            raise Unreadable(f"it has {parsed.frames} frames: send a single picture")
    except Unreadable as error:
        raise _refused(name, error) from error
    return parsed


def decode_cost(
    parsed: Container, mode: Mode, name: str = "image", fitted: Size | None = None
) -> int:
    """Upper bound of the bytes that `decode` takes, without the file.

    Raises:
        ImageTooLarge: above the limit of one picture.
    """
    pixels, area = math.prod(parsed.size), math.prod(fitted or parsed.size)
    copies = {mode: 0, "P": 8, "I;16": 1, "L": 0}.get(parsed.mode, 4)
    if mode == "RGBA":
        copies = max(copies, 4)  # resizing premultiplies by alpha, in a copy
    halfway = math.sqrt(pixels * area) if area < pixels else 0  # after the horizontal resize
    after = pixels * (parsed.pixel_bytes + copies) + 4 * halfway + 4 * area
    cost = int(max(pixels * parsed.peak_bytes, after))
    if cost > MOST_DECODED_BYTES:
        width, height = parsed.size
        raise ImageTooLarge(
            f"{name} has {width}x{height} pixels, and takes {cost >> 20} MiB to decode as "
            f"{parsed.format}: the limit is {MOST_DECODED_BYTES >> 20} MiB, make it smaller",
            param=name,
        )
    return cost


def decode(
    parsed: Container, *, mode: Mode, name: str = "image", fitted: Size | None = None
) -> Image.Image:
    """Decode a parsed file. Slow: call it on a thread.

    Args:
        fitted: size of the result; None: the picture's own.

    Raises:
        UnsupportedImage: the file is damaged or truncated.
    """
    try:
        if parsed.format == "PNG":
            container.check_rows(parsed)
        return _decoded(parsed, mode, fitted)
    except Exception as error:  # decoders raise any class: SyntaxError, struct.error, ...
        raise _refused(name, error) from error


def _decoded(parsed: Container, mode: Mode, fitted: Size | None) -> Image.Image:
    with Image.open(io.BytesIO(parsed.data), formats=(parsed.format,)) as file:
        if file.size != (parsed.width, parsed.height):
            raise Unreadable(CUT_SHORT)
        file.load()
        image = _eight_bits(file)
        if (image.mode, mode) != ("L", "RGB"):  # cheaper after the resize
            image = _converted(image, mode)
        width, height = fitted or parsed.size
        stored = (height, width) if parsed.orientation > 4 else (width, height)
        if image.size != stored:
            image = image.resize(stored)
        if parsed.orientation > 1:
            image = image.transpose(_UPRIGHT[parsed.orientation - 2])
        image = _converted(image, mode)
        if image is file:
            image = image.copy()
    image.info = {}
    return image


def read_data_url(
    url: str | memoryview, *, max_bytes: int = MOST_BYTES, name: str = "image"
) -> bytes:
    """Decode a base64 `data:` URL; its media type is ignored.

    It may use either alphabet (RFC 4648, sections 4 and 5), line breaks, URL escapes, and no
    padding.

    Raises:
        InvalidValue: not such a URL.
        BodyTooLarge: more than `max_bytes`.
    """
    head, comma, _ = _letters(url, 0, 200).partition(b",")
    kind, start = head.lower(), len(head) + 1
    if not comma or not kind.startswith(_KINDS) or not kind.endswith(b";base64"):
        raise InvalidValue.of(name, cut(url), f"must be {DATA_URL}")
    too_large = BodyTooLarge(f"{name} is larger than {max_bytes} bytes", param=name)
    if len(url) - start > 4 * (max_bytes + 3):  # three times the letters of `max_bytes`
        raise too_large
    data, rest, is_padded = io.BytesIO(), b"", False
    try:
        for piece in _base64_pieces(url, start):
            letters = rest + piece
            whole = len(letters) // 4 * 4
            if is_padded and letters:
                raise ValueError("Excess data after padding")
            data.write(binascii.a2b_base64(letters[:whole], strict_mode=True))
            is_padded |= letters.endswith(b"=", 0, whole)
            rest = letters[whole:]
            if data.tell() > max_bytes:
                raise too_large
        if rest:
            data.write(binascii.a2b_base64(rest + b"=" * (4 - len(rest)), strict_mode=True))
    except ValueError as error:
        raise InvalidValue.of(name, cut(url), str(error)) from error
    if data.tell() > max_bytes:
        raise too_large
    return data.getvalue()  # no second copy


def _base64_pieces(url: str | memoryview, start: int) -> Iterator[bytes]:
    """The letters of a URL from `start`, in the standard alphabet, without blanks and escapes."""
    escape = b""
    for at in range(start, len(url), _PIECE):
        piece = escape + _letters(url, at, _PIECE)
        is_last = at + _PIECE >= len(url)
        end = len(piece) if is_last or b"%" not in piece[-2:] else piece.rindex(b"%")
        piece, escape = piece[:end], piece[end:]
        yield (unquote_to_bytes(piece) if b"%" in piece else piece).translate(_URL_SAFE, _BLANKS)


def digest_of(picture: bytes | str | memoryview) -> str:
    """SHA-256 of a picture as sent. Slow: call it on a thread."""
    digest = hashlib.sha256()
    for at in range(0, len(picture), _PIECE):
        digest.update(_letters(picture, at, _PIECE))
    return digest.hexdigest()


def _letters(picture: bytes | str | memoryview, start: int, size: int) -> bytes:
    """A piece of an upload as text: a full copy would block other threads."""
    piece = picture[start : start + size]
    return piece.encode(errors="replace") if isinstance(piece, str) else bytes(piece)


def read_picture(path: Path | BinaryIO, mode: Mode = "RGB") -> Image.Image:
    """Read a user's own file as an upright picture; masks are 8-bit grey, "L".

    Raises:
        InvalidValue: not a readable picture.
    """
    try:
        with Image.open(path) as image:
            upright = _eight_bits(ImageOps.exif_transpose(image))
            plain = _converted(upright, mode)
            plain.info = {}
            return plain
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise InvalidValue(f"{path}: not a picture that can be read: {error}") from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to the upper 8 bits (Pillow takes the lower); keep other modes."""
    if not image.mode.startswith("I"):
        return image
    grey = Image.new("L", image.size)
    for top in range(0, image.height, _BAND):
        box = (0, top, image.width, min(top + _BAND, image.height))
        band = np.asarray(image.crop(box)) >> 8
        grey.paste(Image.fromarray(band.astype(np.uint8)), box)
    return grey


def _converted(image: Image.Image, mode: Mode) -> Image.Image:
    if image.mode == "P":  # direct RGB conversion warns about transparent colours
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _refused(name: str, error: Exception) -> UnsupportedImage:
    if isinstance(error, Unreadable):
        return UnsupportedImage(f"{name} cannot be read: {error}", param=name)
    rule = UNKNOWN if isinstance(error, UnidentifiedImageError) else CUT_SHORT
    is_telling = isinstance(error, (OSError, ValueError)) and "0x" not in str(error)
    why = f" ({error})"[:100] if is_telling else ""
    return UnsupportedImage(f"{name} cannot be read: {rule}{why}", param=name)


def cut(url: str | memoryview) -> str:
    """Shorten a URL for messages."""
    start = url[:40] if isinstance(url, str) else bytes(url[:40]).decode(errors="replace")
    return start if len(url) <= 40 else start[:37] + "..."
