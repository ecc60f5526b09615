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
        arguments: pictures are of mode RGB, RGBA, L or 1, alone or in lists of any depth.

    Returns:
        By argument the file names and modes of its pictures: [[name, mode], ...], where a single
        one is no list; {"list": [...]} where a list has one entry, or lists; and the files by name.
    """
    files: dict[str, bytes] = {}

    def stored(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return {"list": [stored(entry) for entry in value]}
        picture = value.convert("L") if value.mode == "1" else value  # as pipelines read masks
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
    """Read a picture that `packed` has stored.

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
