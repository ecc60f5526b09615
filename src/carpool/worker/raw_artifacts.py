"""Meshes and audio as plain bytes, to send from a worker to the front."""

import msgspec
import numpy as np

from carpool.artifacts import Mesh, Sound


class RawSound(msgspec.Struct):
    """The output of an audio-only model."""

    samples: bytes  # float32 in native byte order, (channels, samples)
    channels: int
    rate: int  # Hz


class RawMesh(msgspec.Struct):
    """A mesh; see `carpool.artifacts.Mesh`. Numbers are in native byte order."""

    vertices: bytes  # float32, (vertices, 3)
    faces: bytes  # uint32, (faces, 3)
    colours: bytes = b""  # uint8, (vertices, 3)
    places: bytes = b""  # float32, (vertices, 2)
    texture: bytes = b""  # a PNG


def mesh_of(raw: RawMesh) -> Mesh:
    """Convert a received mesh."""
    return Mesh(
        np.frombuffer(raw.vertices, np.float32).reshape(-1, 3),
        np.frombuffer(raw.faces, np.uint32).reshape(-1, 3),
        np.frombuffer(raw.colours, np.uint8).reshape(-1, 3) if raw.colours else None,
        np.frombuffer(raw.places, np.float32).reshape(-1, 2) if raw.places else None,
        raw.texture,
    )


def sound_of(raw: RawSound) -> Sound:
    """Convert received audio."""
    samples = np.frombuffer(raw.samples, np.float32).reshape(raw.channels, -1)
    return Sound(samples, raw.rate)
