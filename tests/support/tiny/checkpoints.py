"""Tiny random checkpoints in diffusers layout, built offline on first use.

Each module here with a `FAMILIES` and an `ARGUMENTS` table describes a few families: one function
per family returns a pipeline, and its arguments say how to call it. Nothing here knows about
Carpool.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from support.tiny import (
    control,
    ernie,
    flux2,
    glm,
    helios,
    hunyuan,
    ltx2,
    outsiders,
    outsiders_images,
    outsiders_videos,
    qwen,
    sana,
    stable,
    wan,
    zimage,
)

CACHE = Path(__file__).parents[3] / "build" / "tiny"
_MODULES = [
    stable, sana, zimage, wan, ernie, flux2, glm, hunyuan, ltx2, qwen, control, helios, outsiders,
    outsiders_images, outsiders_videos,
]  # fmt: skip
FAMILIES: dict[str, Callable[[], DiffusionPipeline]] = {
    name: build for module in _MODULES for name, build in module.FAMILIES.items()
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    name: arguments for module in _MODULES for name, arguments in module.ARGUMENTS.items()
}


def checkpoint(family: str) -> Path:
    """Return the folder of a family's checkpoint, building it the first time.

    Test processes may race: each builds in a folder of its own, and the first to
    finish wins.

    Args:
        family: a key of `FAMILIES`.
    """
    folder = CACHE / _digest() / family
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=folder.parent))
    try:
        build(family).save_pretrained(draft)
        os.replace(draft, folder)
    except OSError:
        if not folder.is_dir():  # if it is, another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


@cache
def _digest() -> str:
    """Changes with whatever the weights and configs are made of: no folder is ever out of date."""
    made_of = hashlib.sha256()
    for name in ("diffusers", "torch", "transformers"):
        made_of.update(f"{name} {metadata.version(name)}".encode())
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".json", ".jinja"):
            made_of.update(path.read_bytes())
    return made_of.hexdigest()[:12]


def build(family: str) -> DiffusionPipeline:
    """Build a family's pipeline in fp32, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = FAMILIES[family]()
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    return pipeline
