"""Store a job's input pictures as lossless files, so a rerun draws the same result."""

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from carpool.errors import UnsupportedImage
from carpool.media.uploads import Mode, read_image
from carpool.request.images import NAMES

MOST_PIXELS = 1 << 30  # no limit: checked before storage


def packed(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Encode the pictures in a pipeline's arguments as PNG files. Slow: call it on a thread.

    Args:
        arguments: may hold pictures of mode RGB, RGBA, L or 1, in lists of any depth.

    Returns:
        By argument, [name, mode] of its picture or a list of these ({"list": [...]} for a list with
        one entry or with lists in it); and the files by name.
    """
    files: dict[str, bytes] = {}

    def stored(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return {"list": [stored(entry) for entry in value]}
        picture = value.convert("L") if value.mode == "1" else value  # pipelines read masks as L
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=1)
        name = f"input-{len(files)}.png"
        files[name] = file.getvalue()
        return [name, picture.mode]

    named: dict[str, Any] = {}
    for argument in NAMES:
        if (value := arguments.get(argument)) is None:
            continue
        entry = stored(value)
        plain = entry["list"] if isinstance(entry, dict) else [entry]
        is_plain = all(isinstance(entry, list) for entry in plain)
        is_single_in_list = isinstance(entry, dict) and len(plain) == 1
        named[argument] = plain if is_plain and not is_single_in_list else entry
    return named, files


def unpacked(file: bytes, mode: Mode) -> Image.Image:
    """Read a picture that `packed` stored.

    Raises:
        UnsupportedImage: the file is damaged.
    """
    return read_image(file, max_pixels=MOST_PIXELS, mode=mode)


def transparent_mask(file: bytes) -> bytes:
    """Convert a mask (white: redraw) to OpenAI's format: a PNG, transparent where to redraw.

    Raises:
        UnsupportedImage: the mask cannot be read.
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
