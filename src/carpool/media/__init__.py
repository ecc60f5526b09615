"""Encode pictures and videos with the settings that made them; decode pictures safely."""

from carpool.media.metadata import png_text
from carpool.media.outputs import Format, encode_image, encode_video
from carpool.media.uploads import read_picture

__all__ = [
    "Format",
    "encode_image",
    "encode_video",
    "png_text",
    "read_picture",
]
