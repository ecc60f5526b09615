"""WebP files: RIFF chunks, each with its name and size."""

import re
import struct

from carpool.media.container import (
    CUT_SHORT,
    MOST_PARTS,
    TOO_MANY_PARTS,
    Container,
    Unreadable,
    assembled,
    orientation_of_exif,
    orientation_of_xmp,
)

SIGNATURE = re.compile(rb"RIFF....WEBP", re.DOTALL)

_DRAW = (b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF")
_HAS_METADATA = 0x20 | 0x08 | 0x04  # flags of VP8X: a colour profile, EXIF, XMP
_HAS_ALPHA = 0x10


def walk(data: bytes) -> Container:
    """Walk through the chunks.

    Raises:
        Unreadable: it is damaged, or made to cost much.
    """
    parts, at, frames = list[bytes | memoryview](), 12, 0
    size, has_alpha, exif, xmp = None, False, None, None
    for _ in range(MOST_PARTS):
        if at >= len(data):
            break
        name, length = struct.unpack_from("<4sI", data, at)
        content, end = memoryview(data)[at + 8 : at + 8 + length], at + 8 + length + length % 2
        if at + 8 + length > len(data):
            raise Unreadable(CUT_SHORT)
        if size is None and (found := _canvas(name, content)):
            *size, has_alpha = found
        if name == b"VP8X":
            flags = content[0] & ~_HAS_METADATA
            parts.append(b"".join((data[at : at + 8], bytes((flags,)), content[1:])))
        elif name in _DRAW:
            parts.append(memoryview(data)[at:end])
        frames += name == b"ANMF"
        if name == b"EXIF" and exif is None:
            exif = orientation_of_exif(content)
        elif name == b"XMP " and xmp is None:
            xmp = orientation_of_xmp(content)
        at = end
    else:
        raise Unreadable(TOO_MANY_PARTS)
    if size is None:
        raise Unreadable(CUT_SHORT)
    total = 4 + sum(map(len, parts))
    return Container(
        format="WEBP",
        width=size[0],
        height=size[1],
        orientation=exif or xmp or 1,
        frames=max(frames, 1),
        mode="RGBA" if has_alpha else "RGB",
        pixel_bytes=4 + 4 + 4,  # two canvases, and Pillow's own
        peak_bytes=4 + 4 + 4 + 4,  # and a copy on the way
        data=assembled([b"RIFF", struct.pack("<I", total), b"WEBP", *parts]),
    )


def _canvas(name: bytes, content: memoryview) -> tuple[int, int, bool] | None:
    """Width, height and whether it has transparency, where this chunk says that."""
    if name == b"VP8X":
        wide, high = bytes(content[4:7]), bytes(content[7:10])
        width, height = (1 + int.from_bytes(side, "little") for side in (wide, high))
        return width, height, bool(content[0] & _HAS_ALPHA)
    if name == b"VP8 ":
        width, height = struct.unpack_from("<HH", content, 6)
        return width & 0x3FFF, height & 0x3FFF, False
    if name == b"VP8L":
        [bits] = struct.unpack_from("<I", content, 1)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), bool(bits >> 28 & 1)
    return None
