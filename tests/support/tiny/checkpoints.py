"""Tiny random checkpoints in diffusers layout, built offline on first use.

`families.json` says of each family what is special about it, its pipeline class, the recipe of
each part (those of its base are not repeated), and how to call it. Nothing here knows about
Carpool. Torch is imported only where a pipeline is built: a test that only serves a checkpoint
needs none.
"""

import hashlib
import os
import shutil
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from support.tiny.recipes import FAMILIES, recipes_of

CACHE = Path(__file__).parents[3] / "build" / "tiny"
ARGUMENTS: dict[str, dict[str, Any]] = {
    name: family["arguments"] for name, family in FAMILIES.items()
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


def build(family: str) -> Any:
    """Build a family's pipeline in fp32, the same weights every time."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = tiny_pipeline(family)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    return pipeline


def tiny_pipeline(family: str, **parts: Any) -> Any:
    """Build a family's pipeline of newly drawn weights, some of its parts as given."""
    import diffusers

    from support.tiny.parts import part

    recipes = recipes_of(family)
    made = {name: part(recipe) for name, recipe in recipes.items() if name not in parts}
    return getattr(diffusers, FAMILIES[family]["pipeline"])(**made, **parts)
