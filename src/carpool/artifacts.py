"""Outputs of models other than pictures and videos: meshes and sound, as plain arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Mesh:
    """A surface of triangles."""

    vertices: NDArray[np.float32]  # (vertices, 3)
    faces: NDArray[np.uint32]  # (faces, 3), indices of vertices
    colours: NDArray[np.uint8] | None = None  # (vertices, 3), RGB
    places: NDArray[np.float32] | None = None  # (vertices, 2), UV 0-1, origin at bottom
    texture: bytes = b""  # a PNG


@dataclass(frozen=True, slots=True)
class Sound:
    """Sound of one or more channels."""

    samples: NDArray[np.float32]  # (channels, samples), -1 to 1
    rate: int  # samples a second

    @property
    def duration_s(self) -> float:
        return float(self.samples.shape[1] / self.rate)
