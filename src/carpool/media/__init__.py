"""Encode the outputs of models with their settings; decode pictures safely."""

from carpool.media.mesh import MeshFormat, encode_mesh, files_beside
from carpool.media.metadata import png_text
from carpool.media.outputs import Format, encode_image, encode_video
from carpool.media.sound import SoundFormat, encode_sound
from carpool.media.uploads import read_picture

__all__ = [
    "Format",
    "MeshFormat",
    "SoundFormat",
    "encode_image",
    "encode_mesh",
    "encode_sound",
    "encode_video",
    "files_beside",
    "png_text",
    "read_picture",
]
