"""Store the input pictures of a job as lossless files: a job that is run again draws the same."""

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from carpool.errors import UnsupportedImage
from carpool.media.uploads import Mode, read_image
from carpool.request.images import NAMES

MOST_PIXELS = 1 << 30  # they were checked before they were stored


def packed(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The pictures among a pipeline's arguments as PNG files. Slow: call it on a thread.

    Args:
        arguments: pictures are of mode RGB, RGBA, L or 1, alone or in lists.

    Returns:
        By argument the file names and modes of its pictures; and the files by name.
    """
    named: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for argument in NAMES:
        given = arguments.get(argument, [])
        for one in [given] if isinstance(given, Image.Image) else given:
            picture = one.convert("L") if one.mode == "1" else one  # as pipelines read masks
            file = io.BytesIO()
            picture.save(file, "PNG", compress_level=1)
            name = f"input-{len(files)}.png"
            named.setdefault(argument, []).append([name, picture.mode])
            files[name] = file.getvalue()
    return named, files


def unpacked(file: bytes, mode: Mode) -> Image.Image:
    """A picture as it was before `packed`.

    Raises:
        UnsupportedImage: the disk has spoiled it.
    """
    return read_image(file, max_pixels=MOST_PIXELS, mode=mode)


def transparent_mask(file: bytes) -> bytes:
    """A mask that is white where to draw anew, as OpenAI's API has it: a PNG, transparent there.

    Raises:
        UnsupportedImage: it cannot be read.
    """
    try:
        with Image.open(io.BytesIO(file), formats=["PNG", "JPEG", "WEBP"]) as opened:
            white = opened.convert("L")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UnsupportedImage(f"mask cannot be read: {error}", param="mask") from None
    mask = Image.new("RGBA", white.size, "white")
    mask.putalpha(white.point(lambda value: 255 - value))
    out = io.BytesIO()
    mask.save(out, "PNG")
    return out.getvalue()
