"""What a PNG, JPEG or WebP file says of its picture, and the part of it that draws.

Decoders are made for files that mean well: they unpack texts that nobody asked for, write a line
for every broken tag, and step over padding byte by byte. So `png`, `jpeg` and `webp` walk through a
file first, in time that its contents cannot stretch, and leave a decoder only the parts that it
draws from. Of the rest nothing is read but which way is up.
"""

import io
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MOST_PARTS = 20_000  # chunks of a PNG or WebP, segments of a JPEG
TOO_MANY_PARTS = f"it has more than {MOST_PARTS} parts: save it anew"
CUT_SHORT = "the file is damaged or cut short"

PIXEL_BYTES = {"L": 1, "P": 1, "I;16": 2}  # of Pillow's images by mode; 4 of all others

_ORIENTATION = 0x0112  # the EXIF tag
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_PIECE = 1 << 20
_MOST_METADATA = 1 << 17  # bytes that are searched


class Unreadable(ValueError):
    """The file is not one that is read here; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Container:
    """A file that has been walked through."""

    format: Literal["PNG", "JPEG", "WEBP"]
    width: int  # as it is stored, maybe turned
    height: int
    orientation: int  # of EXIF, 1 to 8; 1 is upright
    frames: int
    mode: str  # that Pillow decodes it to
    pixel_bytes: float  # that a decoder takes for each pixel, until it is closed
    peak_bytes: float  # the same while it decodes
    data: bytes  # the file without its metadata
    packed: Sequence[memoryview] = ()  # of a PNG: its rows, compressed
    unpacked_bytes: int = 0  # as many as these are

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture."""
        return (self.height, self.width) if self.orientation > 4 else (self.width, self.height)


def joined(data: bytes, parts: Iterable[tuple[int, int]]) -> bytes:
    """These parts of a file; the file itself, if they are all of it."""
    runs = list[tuple[int, int]]()
    for start, end in parts:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    view = memoryview(data)
    return data if runs == [(0, len(data))] else assembled(view[a:b] for a, b in runs)


def assembled(parts: Iterable[bytes | memoryview]) -> bytes:
    """These parts as one, copied once and in pieces, so that other threads may run."""
    whole = io.BytesIO()
    for part in parts:
        for at in range(0, len(part), _PIECE):
            whole.write(part[at : at + _PIECE])
    return whole.getvalue()  # not a copy


def orientation_of_exif(exif: bytes | memoryview) -> int:
    """The orientation, 1 to 8; 0 where EXIF says none."""
    tiff = bytes(exif[:_MOST_METADATA]).removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        if order is not None:
            [start] = struct.unpack_from(order + "I", tiff, 4)
            [count] = struct.unpack_from(order + "H", tiff, start)
            for at in range(start + 2, start + 2 + 12 * count, 12):
                tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, at)
                if tag == _ORIENTATION:
                    return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:  # it ends before
        pass
    return 0


def orientation_of_xmp(xmp: bytes | memoryview) -> int:
    """The same of XMP."""
    found = _XMP.search(bytes(xmp[:_MOST_METADATA]))
    return int(found[1]) if found else 0
