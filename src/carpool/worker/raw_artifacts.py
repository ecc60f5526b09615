"""Meshes and sound as they cross from a worker to the front: plain bytes."""

import msgspec
import numpy as np

from carpool.artifacts import Mesh, Sound


class RawSound(msgspec.Struct):
    """The sound of a model that makes no pictures with it."""

    samples: bytes  # float32 in native byte order, (channels, samples)
    channels: int
    rate: int  # samples a second


class RawMesh(msgspec.Struct):
    """A mesh; see `carpool.artifacts.Mesh`. Numbers are in native byte order."""

    vertices: bytes  # float32, (vertices, 3)
    faces: bytes  # uint32, (faces, 3)
    colours: bytes = b""  # uint8, (vertices, 3)
    places: bytes = b""  # float32, (vertices, 2)
    texture: bytes = b""  # a PNG


def mesh_of(raw: RawMesh) -> Mesh:
    """A mesh as it was in the worker."""
    return Mesh(
        np.frombuffer(raw.vertices, np.float32).reshape(-1, 3),
        np.frombuffer(raw.faces, np.uint32).reshape(-1, 3),
        np.frombuffer(raw.colours, np.uint8).reshape(-1, 3) if raw.colours else None,
        np.frombuffer(raw.places, np.float32).reshape(-1, 2) if raw.places else None,
        raw.texture,
    )


def sound_of(raw: RawSound) -> Sound:
    """Sound as it was in the worker."""
    samples = np.frombuffer(raw.samples, np.float32).reshape(raw.channels, -1)
    return Sound(samples, raw.rate)
