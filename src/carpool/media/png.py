"""PNG files: chunks, each with its size, name and checksum."""

import re
import struct
import zlib

from carpool.media.container import (
    CUT_SHORT,
    MOST_PARTS,
    PIXEL_BYTES,
    TOO_MANY_PARTS,
    Container,
    Unreadable,
    joined,
    orientation_of_exif,
    orientation_of_xmp,
)

SIGNATURE = re.compile(rb"\x89PNG\r\n\x1a\n")

_DRAW = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_MOST_BYTES = {b"IHDR": 13, b"PLTE": 768, b"tRNS": 256, b"IEND": 0}
_BANDS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_MODES = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}
_PASSES = (  # of an interlaced PNG: the first column and row, and the steps to the next ones
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)
)  # fmt: skip
_XMP = b"XML:com.adobe.xmp\0\0"  # not compressed
_READ, _UNPACKED = 1 << 16, 1 << 20  # bytes at a time; between two, other threads may run


def walk(data: bytes) -> Container:
    """Walk through the chunks.

    Raises:
        Unreadable: it is damaged, or made to cost much.
    """
    parts, rows, kept, at = [(0, 8)], list[tuple[int, int]](), 8, 8
    header, exif, xmp, frames = b"", None, None, 1
    for _ in range(MOST_PARTS):
        size, name = struct.unpack_from(">I4s", data, at)
        content, end = memoryview(data)[at + 8 : at + 8 + size], at + 12 + size
        if end > len(data) or size > _MOST_BYTES.get(name, size):
            raise Unreadable(CUT_SHORT)
        if bool(header) == (name == b"IHDR"):
            raise Unreadable("it has no header, or two")
        if name in _DRAW:
            parts.append((at, end))
            kept += end - at
        match name:
            case b"IHDR":
                header = bytes(content)
            case b"IDAT":
                rows.append((kept - 4 - size, kept - 4))
            case b"acTL":
                [frames] = struct.unpack_from(">I", content)
            case b"eXIf" if exif is None:
                exif = orientation_of_exif(content)
            case b"iTXt" if xmp is None and data.startswith(_XMP, at + 8):
                xmp = orientation_of_xmp(content)
            case b"IEND":
                break
        at = end
    else:
        raise Unreadable(TOO_MANY_PARTS)
    drawn = joined(data, parts)
    width, height, depth, colour, _, _, is_laced = struct.unpack(">IIBBBBB", header)
    mode = _MODES.get(colour, "RGBA") if colour or depth < 16 else "I;16"
    return Container(
        format="PNG",
        width=width,
        height=height,
        orientation=exif or xmp or 1,
        frames=frames,
        mode=mode,
        pixel_bytes=PIXEL_BYTES.get(mode, 4),
        peak_bytes=PIXEL_BYTES.get(mode, 4),
        data=drawn,
        packed=[memoryview(drawn)[start:end] for start, end in rows],
        unpacked_bytes=_rows_bytes(width, height, depth * _BANDS.get(colour, 4), bool(is_laced)),
    )


def check_rows(container: Container) -> None:
    """See that there are as many rows as the header says: Pillow does not mind. Takes its time.

    Raises:
        Unreadable: there are fewer.
    """
    unpacker, left = zlib.decompressobj(), container.unpacked_bytes
    for packed in container.packed:
        for start in range(0, len(packed), _READ):
            piece: bytes | memoryview = packed[start : start + _READ]
            while left > 0:
                rows = unpacker.decompress(piece, _UNPACKED)
                left -= len(rows)
                piece = unpacker.unconsumed_tail
                if not piece and len(rows) < _UNPACKED:
                    break
            if left <= 0:
                return
    if left > 0:
        raise Unreadable("it has fewer rows than it states")


def _rows_bytes(width: int, height: int, bits: int, is_laced: bool) -> int:
    """Of all rows, each with the byte that names its filter."""
    total = 0
    for left, top, across, down in _PASSES if is_laced else ((0, 0, 1, 1),):
        columns, rows = -((left - width) // across), -((top - height) // down)
        if columns > 0:
            total += max(rows, 0) * (1 + -(-columns * bits // 8))
    return total
