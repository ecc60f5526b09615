"""JPEG files: segments, each with its marker and size, and scans, which have no size."""

import re
import struct

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

SIGNATURE = re.compile(rb"\xff\xd8\xff")
MOST_SCANS = 100  # each may draw the whole picture again, from a few bytes
MOST_PADDING = 1000  # bytes that are none of a segment or scan

_SCAN, _END, _COMMENT = 0xDA, 0xD9, 0xFE
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_APPLICATION = range(0xE0, 0xF0)
_COLOURS = {0xE0: b"JFIF\0", 0xEE: b"Adobe"}  # what decoders tell colours by
_FRAME = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_SEARCHED = 1 << 20  # bytes at a time; between two, other threads may run


def walk(data: bytes) -> Container:
    """Walk through the segments, up to the first scan.

    Raises:
        Unreadable: it is damaged, or made to cost much.
    """
    parts, at, padding = [(0, 2)], 2, 0
    frame, exif, xmp = b"", None, None
    for _ in range(MOST_PARTS):
        while data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            at, padding = at + 1, padding + 1
            if padding > MOST_PADDING:
                raise _padded()
        marker = data[at + 1]
        if marker == _SCAN:
            break
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # has no size and no sense here
            at += 2
            continue
        [size] = struct.unpack_from(">H", data, at + 2)
        content, end = memoryview(data)[at + 4 : at + 2 + size], at + 2 + size
        if marker == _END or size < 2 or end > len(data):
            raise Unreadable(CUT_SHORT)
        if marker == 0xE1 and exif is None and data.startswith(b"Exif\0\0", at + 4):
            exif = orientation_of_exif(content)
        elif marker == 0xE1 and xmp is None and data.startswith(_XMP, at + 4):
            xmp = orientation_of_xmp(content)
        if marker in _FRAME:
            if frame:
                raise Unreadable("it has two headers")
            frame = bytes((marker, *content))
        is_metadata = marker in _APPLICATION or marker == _COMMENT
        if not is_metadata or data.startswith(_COLOURS.get(marker, ()), at + 4):
            parts.append((at, end))
        at = end
    else:
        raise Unreadable(TOO_MANY_PARTS)
    kind, _, height, width, bands = struct.unpack_from(">BBHHB", frame)
    scans = _count(data, b"\xff\xda", at)
    if scans > MOST_SCANS:
        raise Unreadable(f"a JPEG may have at most {MOST_SCANS} scans: save it anew")
    if _count(data, b"\xff\xff", at) > MOST_PADDING:
        raise _padded()
    mode = {1: "L", 3: "RGB"}.get(bands, "CMYK")
    pixel_bytes, coefficients = PIXEL_BYTES.get(mode, 4), 0.0
    if kind in _PROGRESSIVE or scans > 1:  # two bytes a coefficient, until the last scan
        areas = [(one >> 4) * (one & 15) for one in frame[8::3]]
        coefficients = 2 * sum(areas) / max([1, *areas])
    return Container(
        format="JPEG",
        width=width,
        height=height,
        orientation=exif or xmp or 1,
        frames=1,  # a phone's may carry further pictures (MPO): the first is what it shows
        mode=mode,
        pixel_bytes=pixel_bytes,
        peak_bytes=pixel_bytes + coefficients,
        data=joined(data, [*parts, (at, len(data))]),
    )


def _count(data: bytes, what: bytes, start: int) -> int:
    pieces = range(start, len(data), _SEARCHED)
    return sum(data.count(what, at, at + _SEARCHED) for at in pieces)


def _padded() -> Unreadable:
    return Unreadable(f"it has more than {MOST_PADDING} bytes of padding: save it anew")
