"""Encode pictures as PNG, JPEG or WebP and videos as MP4; make thumbnails of videos.

All functions are slow: call them on a thread.
"""

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from carpool.errors import InvalidValue, LibraryMissing
from carpool.media.metadata import XMP, as_json, exif, png_text, xmp_box

Format = Literal["png", "jpeg", "webp"]
Audio = tuple[NDArray[np.float32], int]
"""Samples (channels, samples) from -1 to 1, one or two channels; samples a second."""

FPS = 16.0  # default frame rate of a video
MOST_FPS = 240
THUMBNAIL_PX = 512  # longer side
SPRITE_PX = 256  # longer side of each picture in a sheet
MOST_SPRITES = 16


def check_fps(rate: float, name: str, text: str) -> float:
    """Check frames a second; InvalidValue if out of range.

    Args:
        name, text: name and value of the parameter, for the message.
    """
    if not 1 <= rate <= MOST_FPS:
        raise InvalidValue(f"{name}={text}: must be from 1 to {MOST_FPS}", param=name)
    return float(rate)


class RawPicture(Protocol):
    """The pixels of a picture, as a worker sends them."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def rgb(self) -> bytes: ...  # 3 * width * height, row by row


def encode_image(
    picture: Image.Image | RawPicture,
    format: Format,
    compression: int = 100,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode a picture.

    Args:
        compression: quality of JPEG and WebP, 0-100; the name is OpenAI's.
        metadata: settings to write into the file, with the statement that a model made it; {}: only
            the statement; None: neither.
    """
    if not isinstance(picture, Image.Image):
        picture = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    out = io.BytesIO()
    options: dict[str, Any] = {} if format == "png" else {"quality": compression}
    if metadata is not None and format == "png":
        options |= {"pnginfo": png_text(metadata)}
    elif metadata is not None:
        options |= {"xmp": XMP.encode()} | ({"exif": exif(metadata)} if metadata else {})
    picture.save(out, format.upper(), **options)
    return out.getvalue()


def write_mp4(
    frames: NDArray[np.uint8],
    fps: float,
    audio: Audio | None,
    out: Path | BinaryIO,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write an MP4: H.264 4:2:0 (odd sides lose a pixel), and AAC if there is audio.

    Args:
        frames: (frames, height, width, 3).
        out: a path, or an open file. Only a file with a path can be played during its
            download.
        metadata: see `encode_image`.

    Raises:
        LibraryMissing: PyAV is not installed.
    """
    av = pyav()
    flags = "use_metadata_tags" + ("+faststart" if isinstance(out, Path) else "")
    file = str(out) if isinstance(out, Path) else out
    with av.open(file, "w", format="mp4", options={"movflags": flags}) as container:
        if metadata:
            container.metadata["comment"] = as_json(metadata)
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = (side - side % 2 for side in frames.shape[1:3])
        stream.pix_fmt = "yuv420p"
        # With mbtree, equal frames give different files at many sizes, such as 480x480 pixels: it
        # reads uninitialized memory. Files at crf 15 are as large as with mbtree at crf 14.
        stream.options = {"crf": "15", "x264-params": "mbtree=0"}
        sound = None
        if audio is not None:  # both streams must exist before the first packet
            samples, rate = audio
            layout = "mono" if len(samples) == 1 else "stereo"
            sound = container.add_stream("aac", rate=rate, layout=layout)
        for picture in frames:
            cut = np.ascontiguousarray(picture[: stream.height, : stream.width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(cut, format="rgb24")))
        container.mux(stream.encode())
        if sound is not None:
            clipped = np.ascontiguousarray(np.clip(samples, -1, 1), dtype=np.float32)
            frame = av.AudioFrame.from_ndarray(clipped, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, 0
            container.mux(sound.encode(frame))
            container.mux(sound.encode())
    if metadata is not None:
        with out.open("ab") if isinstance(out, Path) else nullcontext(out) as end:
            end.seek(0, io.SEEK_END)
            end.write(xmp_box())


def encode_video(
    frames: Sequence[Image.Image], fps: float, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """Encode PIL images of equal size as an MP4; see `write_mp4`."""
    out = io.BytesIO()
    pictures = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
    write_mp4(pictures, fps, None, out, metadata=metadata)
    return out.getvalue()


def thumbnail(path: Path) -> bytes:
    """The first frame of a video, small, as WebP."""
    with pyav().open(str(path)) as container:
        first: Image.Image = next(container.decode(video=0)).to_image()
    first.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    return encode_image(first, "webp", 80, {})


def spritesheet(path: Path) -> bytes:
    """Up to 16 frames of a video, evenly spaced, row by row in one JPEG."""
    with pyav().open(str(path)) as container:
        count = container.streams.video[0].frames
        frames = min(count, MOST_SPRITES)
        numbers = {round(i * (count - 1) / max(frames - 1, 1)) for i in range(frames)}
        sprites = [
            frame.to_image() for i, frame in enumerate(container.decode(video=0)) if i in numbers
        ]
    for sprite in sprites:
        sprite.thumbnail((SPRITE_PX, SPRITE_PX))
    width, height = sprites[0].size
    columns = math.ceil(math.sqrt(len(sprites)))
    sheet = Image.new("RGB", (columns * width, -(-len(sprites) // columns) * height))
    for i, sprite in enumerate(sprites):
        sheet.paste(sprite, (i % columns * width, i // columns * height))
    return encode_image(sheet, "jpeg", 80, {})


def pyav(need: str = "videos need") -> ModuleType:
    """Import PyAV; LibraryMissing if it is not installed.

    Args:
        need: the beginning of the message.
    """
    try:
        import av
    except ImportError as error:
        raise LibraryMissing(f"{need} PyAV: pip install av") from error
    return av
