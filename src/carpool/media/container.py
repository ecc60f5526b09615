"""Parse PNG, JPEG and WebP files before a decoder reads them.

Decoders trust their input: they decompress text chunks, log every broken tag and skip padding byte
by byte. So the chunks of a file are parsed first, in time linear in its size, and the decoder gets
only the chunks that it needs to draw. The only metadata read is the orientation.
"""

import io
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

MOST_PARTS = 20_000  # chunks of a PNG or WebP, segments of a JPEG
MOST_SCANS = 100  # scans of a JPEG: each may draw the whole picture again
MOST_PADDING = 1000  # bytes of a JPEG outside of segments and scans
CUT_SHORT = "the file is damaged or cut short"
UNKNOWN = "it is no PNG, JPEG or WebP, whatever its name says: save it as one of these"
_TOO_MANY_PARTS = f"it has more than {MOST_PARTS} parts: save it again"
_PADDED = f"it has more than {MOST_PADDING} bytes of padding: save it again"
_PIECE = 1 << 20  # bytes per step; other threads may run in between
_INFLATED = 1 << 16  # decompressed bytes per step
_PIXEL_BYTES = {"L": 1, "P": 1, "I;16": 2}  # Pillow's bytes a pixel, by mode; 4 for all others

_METADATA: dict[bytes, tuple[tuple[str, bytes], ...]] = {  # by chunk: kinds and prefixes
    b"eXIf": (("exif", b""),),
    b"EXIF": (("exif", b""),),
    b"XMP ": (("xmp", b""),),
    b"iTXt": (("xmp", b"XML:com.adobe.xmp\0\0"),),  # not compressed
    b"\xe1": (("exif", b"Exif\0\0"), ("xmp", b"http://ns.adobe.com/xap/1.0/\0")),
}
_MOST_METADATA = 1 << 17  # most bytes that are searched
_ORIENTATION = 0x0112  # the EXIF tag
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')

_PNG_DRAWS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG_MOST_BYTES = {b"IHDR": 13, b"PLTE": 768, b"tRNS": 256, b"IEND": 0}
_PNG_COLOURS = {0: ("L", 1), 2: ("RGB", 3), 3: ("P", 1), 4: ("LA", 2), 6: ("RGBA", 4)}
_PNG_PASSES = (  # Adam7 passes: first column and row, steps
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)
)  # fmt: skip
_WEBP_DRAWS = (b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF")
_WEBP_METADATA = 0x20 | 0x08 | 0x04  # flags of VP8X: a colour profile, EXIF, XMP
_WEBP_ALPHA = 0x10
_JPEG_SCAN, _JPEG_END, _JPEG_COMMENT = 0xDA, 0xD9, 0xFE  # markers
_JPEG_COLOURS = {0xE0: b"JFIF\0", 0xEE: b"Adobe"}  # segments that define the colours
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}


class Unreadable(ValueError):
    """The file cannot be read; the message names the problem."""


@dataclass(frozen=True, slots=True)
class Container:
    """A parsed file."""

    format: Literal["PNG", "JPEG", "WEBP"]
    width: int  # as stored, before the rotation to upright
    height: int
    orientation: int  # EXIF's, 1 to 8; 1 is upright
    frames: int
    mode: str  # Pillow's mode after decoding
    pixel_bytes: float  # a decoder's bytes for each pixel, until it is closed
    peak_bytes: float  # the same while it decodes
    data: bytes  # the file without its metadata
    row_bytes: int = 0  # decompressed bytes of all rows of a PNG
    has_alpha: bool = False  # parts of it may be transparent

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture."""
        return (self.height, self.width) if self.orientation > 4 else (self.width, self.height)


def parse(data: bytes) -> Container:
    """Parse a file by its signature.

    Raises:
        Unreadable: another format, damaged, or built to be expensive.
    """
    try:
        for signature, parser in _PARSERS.items():
            if re.match(signature, data, re.DOTALL):
                return parser(data)
    except (struct.error, IndexError) as error:  # truncated
        raise Unreadable(CUT_SHORT) from error
    raise Unreadable(UNKNOWN)


def _png(data: bytes) -> Container:
    parts, header, frames, metadata = [(0, 8)], b"", 1, dict[str, memoryview]()
    has_alpha = False
    for name, content, at, end in _chunks(data, 8, ">I4s", crc_bytes=4):
        if len(content) > _PNG_MOST_BYTES.get(name, len(content)):
            raise Unreadable(CUT_SHORT)
        if bool(header) == (name == b"IHDR"):
            raise Unreadable("it has no header, or two")
        if name in _PNG_DRAWS:
            parts.append((at, end))
        has_alpha |= name == b"tRNS"
        if name == b"IHDR":
            header = bytes(content)
        elif name == b"acTL":
            [frames] = struct.unpack_from(">I", content)
        elif name == b"IEND":
            break
        _note(metadata, name, content)
    else:
        raise Unreadable(CUT_SHORT)
    width, height, depth, colour, _, _, is_laced = struct.unpack(">IIBBBBB", header)
    mode, bands = _PNG_COLOURS.get(colour, ("RGBA", 4))
    mode = "I;16" if colour == 0 and depth >= 16 else mode
    row_bytes = 0  # each row begins with a byte that names its filter
    for x, top, across, down in _PNG_PASSES if is_laced else ((0, 0, 1, 1),):
        columns, rows = -((x - width) // across), -((top - height) // down)
        if columns > 0:
            row_bytes += max(rows, 0) * (1 + -(-columns * depth * bands // 8))
    pixel_bytes = _PIXEL_BYTES.get(mode, 4)
    return Container(
        "PNG", width, height, _orientation(metadata), frames, mode, pixel_bytes,
        peak_bytes=pixel_bytes, data=_joined(data, parts), row_bytes=row_bytes,
        has_alpha=has_alpha or mode in ("LA", "RGBA"),
    )  # fmt: skip


def check_rows(png: Container) -> None:
    """Check that a PNG has all rows of its header: Pillow draws missing rows black. Slow.

    Raises:
        Unreadable: rows are missing.
    """
    unpacker, missing_bytes = zlib.decompressobj(), png.row_bytes
    for name, content, _, _ in _chunks(png.data, 8, ">I4s", crc_bytes=4):
        for start in range(0, len(content) if name == b"IDAT" else 0, _INFLATED):
            piece: bytes | memoryview = content[start : start + _INFLATED]
            while missing_bytes > 0:
                rows = unpacker.decompress(piece, _PIECE)
                missing_bytes -= len(rows)
                piece = unpacker.unconsumed_tail
                if not piece and len(rows) < _PIECE:
                    break
            if missing_bytes <= 0:
                return
    if missing_bytes > 0:
        raise Unreadable("it has fewer rows than it states")


def _webp(data: bytes) -> Container:
    parts, frames, canvas = list[bytes | memoryview](), 0, None
    metadata = dict[str, memoryview]()
    for name, content, at, end in _chunks(data, 12, "<4sI"):
        canvas = canvas or _webp_canvas(name, content)
        if name == b"VP8X":
            flags = content[0] & ~_WEBP_METADATA
            parts.append(b"".join((data[at : at + 8], bytes((flags,)), content[1:])))
        elif name in _WEBP_DRAWS:
            parts.append(memoryview(data)[at:end])
        frames += name == b"ANMF"
        _note(metadata, name, content)
    if canvas is None:
        raise Unreadable(CUT_SHORT)
    width, height, has_alpha = canvas
    size = struct.pack("<I", 4 + sum(map(len, parts)))
    return Container(
        "WEBP", width, height, _orientation(metadata), max(frames, 1),
        mode="RGBA" if has_alpha else "RGB",
        pixel_bytes=4 + 4 + 4,  # two canvases, and Pillow's own
        peak_bytes=4 + 4 + 4 + 4,  # and a copy on the way
        data=_assembled([b"RIFF", size, b"WEBP", *parts]),
        has_alpha=has_alpha,
    )  # fmt: skip


def _webp_canvas(name: bytes, content: memoryview) -> tuple[int, int, bool] | None:
    """Width, height and transparency, if this chunk has them."""
    if name == b"VP8X":
        sides = bytes(content[4:7]), bytes(content[7:10])
        width, height = (1 + int.from_bytes(side, "little") for side in sides)
        return width, height, bool(content[0] & _WEBP_ALPHA)
    if name == b"VP8 ":
        width, height = struct.unpack_from("<HH", content, 6)
        return width & 0x3FFF, height & 0x3FFF, False
    if name == b"VP8L":
        [bits] = struct.unpack_from("<I", content, 1)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), bool(bits >> 28 & 1)
    return None


def _jpeg(data: bytes) -> Container:
    parts, at, padding, frame, metadata = [(0, 2)], 2, 0, b"", dict[str, memoryview]()
    for _ in range(MOST_PARTS):
        while data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            at, padding = at + 1, padding + 1
            if padding > MOST_PADDING:
                raise Unreadable(_PADDED)
        marker = data[at + 1]
        if marker == _JPEG_SCAN:
            break
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a size
            at += 2
            continue
        [size] = struct.unpack_from(">H", data, at + 2)
        content, end = memoryview(data)[at + 4 : at + 2 + size], at + 2 + size
        if marker == _JPEG_END or size < 2 or end > len(data):
            raise Unreadable(CUT_SHORT)
        if marker in _JPEG_FRAMES:
            if frame:
                raise Unreadable("it has two headers")
            frame = bytes((marker, *content))
        _note(metadata, bytes((marker,)), content)
        is_metadata = 0xE0 <= marker <= 0xEF or marker == _JPEG_COMMENT
        if not is_metadata or data.startswith(_JPEG_COLOURS.get(marker, ()), at + 4):
            parts.append((at, end))
        at = end
    else:
        raise Unreadable(_TOO_MANY_PARTS)
    kind, _, height, width, bands = struct.unpack_from(">BBHHB", frame)
    if (scans := _count(data, b"\xff\xda", at)) > MOST_SCANS:
        raise Unreadable(f"a JPEG may have at most {MOST_SCANS} scans: save it again")
    if _count(data, b"\xff\xff", at) > MOST_PADDING:
        raise Unreadable(_PADDED)
    mode = {1: "L", 3: "RGB"}.get(bands, "CMYK")
    pixel_bytes, coefficients = _PIXEL_BYTES.get(mode, 4), 0.0
    if kind in _JPEG_PROGRESSIVE or scans > 1:  # two bytes a coefficient, until the last scan
        areas = [(sampling >> 4) * (sampling & 15) for sampling in frame[8::3]]
        coefficients = 2 * sum(areas) / max([1, *areas])
    return Container(
        "JPEG", width, height, _orientation(metadata),
        frames=1,  # phones append pictures (MPO): only the first counts
        mode=mode, pixel_bytes=pixel_bytes, peak_bytes=pixel_bytes + coefficients,
        data=_joined(data, [*parts, (at, len(data))]),
    )  # fmt: skip


_PARSERS = {rb"\x89PNG\r\n\x1a\n": _png, rb"\xff\xd8\xff": _jpeg, rb"RIFF....WEBP": _webp}


def _chunks(
    data: bytes, at: int, head: str, *, crc_bytes: int = 0
) -> Iterator[tuple[bytes, memoryview, int, int]]:
    """The chunks of a PNG (each with a CRC) or WebP (padded to even sizes), from `at`.

    Yields:
        Name, content, start and end of each.
    """
    for _ in range(MOST_PARTS):
        if at >= len(data):
            return
        fields = struct.unpack_from(head, data, at)
        name, size = fields if head[0] == "<" else fields[::-1]
        if (end := at + 8 + size + crc_bytes) > len(data):
            raise Unreadable(CUT_SHORT)
        end += 0 if crc_bytes else size % 2
        yield name, memoryview(data)[at + 8 : at + 8 + size], at, end
        at = end
    raise Unreadable(_TOO_MANY_PARTS)


def _note(chunks: dict[str, memoryview], name: bytes, content: memoryview) -> None:
    """Store the first EXIF and the first XMP of a file."""
    for kind, prefix in _METADATA.get(name, ()):
        if content[: len(prefix)] == prefix:
            chunks.setdefault(kind, content)


def _orientation(metadata: dict[str, memoryview]) -> int:
    """The orientation from EXIF, otherwise from XMP, otherwise 1."""
    tiff, xmp = (bytes(metadata.get(kind, b"")[:_MOST_METADATA]) for kind in ("exif", "xmp"))
    tiff = tiff.removeprefix(b"Exif\0\0")
    try:
        if order := {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4]):
            [start] = struct.unpack_from(order + "I", tiff, 4)
            [count] = struct.unpack_from(order + "H", tiff, start)
            for at in range(start + 2, start + 2 + 12 * count, 12):
                tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, at)
                if tag == _ORIENTATION:
                    return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:  # truncated
        pass
    match = _XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match else 1


def _count(data: bytes, marker: bytes, start: int) -> int:
    return sum(data.count(marker, at, at + _PIECE) for at in range(start, len(data), _PIECE))


def _joined(data: bytes, parts: Iterable[tuple[int, int]]) -> bytes:
    """Join parts of a file; returns the file itself if they are the whole file."""
    runs = list[tuple[int, int]]()
    for start, end in parts:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    view = memoryview(data)
    return data if runs == [(0, len(data))] else _assembled(view[a:b] for a, b in runs)


def _assembled(parts: Iterable[bytes | memoryview]) -> bytes:
    """Join parts with one copy, in pieces, so other threads can run."""
    whole = io.BytesIO()
    for part in parts:
        for at in range(0, len(part), _PIECE):
            whole.write(part[at : at + _PIECE])
    return whole.getvalue()  # no second copy
