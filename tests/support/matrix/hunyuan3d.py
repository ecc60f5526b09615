"""Hunyuan3D-2, by its own package: a mesh of a picture."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from carpool.engine.model.hunyuan3d import Hunyuan3DPipeline, read_shapes
from support.matrix.case import Case
from support.tiny import hunyuan3d

PICTURES = [
    Image.fromarray(np.random.RandomState(seed).randint(0, 255, (28, 28, 4), np.uint8))
    for seed in range(3)
]
COARSE: dict[str, Any] = {"prompt": None, "octree_resolution": 8, "num_chunks": 200}
FIRST: dict[str, Any] = {"image": PICTURES[0], "seed": 1, "guidance_scale": 5.0}
SECOND: dict[str, Any] = {"image": PICTURES[1], "seed": 2, "guidance_scale": 2.0}
THIRD: dict[str, Any] = {"image": PICTURES[2], "seed": 3, "num_inference_steps": 2}
FOURTH: dict[str, Any] = {"image": PICTURES[0], "seed": 4, "num_inference_steps": 4}


def build(size: str) -> Hunyuan3DPipeline:
    with tempfile.TemporaryDirectory() as folder:
        return read_shapes(hunyuan3d.write(Path(folder), size), torch.float32)


CASES = [
    Case(
        name=name,
        is_fast=True,
        build=partial(build, size),
        needs_hy3dgen=True,
        task="image-to-mesh",
        common=COARSE | {"mc_level": level},
        requests=(
            {**FIRST, "num_inference_steps": 5},
            {**SECOND, "num_inference_steps": 3},
            THIRD,
            FOURTH,
        ),
        matters=("image", "seed", "guidance_scale"),
        fuses={"conditioner.forward": 1.3, "model.forward": 1.8, "vae.forward": 1.0},
    )
    for name, size, level in (  # levels that surfaces of drawn weights have
        ("hunyuan3d-2", "hunyuan3d-dit-v2-0", -1.2),
        ("hunyuan3d-2-turbo", "hunyuan3d-dit-v2-0-turbo", 0.5),
        ("hunyuan3d-2mini", "hunyuan3d-dit-v2-mini", 0.5),
    )
]
