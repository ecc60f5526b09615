"""Build a pipeline by the user's own function, named as `module:function`.

So each worker can build it, also after a restart.
"""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from carpool.engine.model.modular import Pipeline
from carpool.errors import LoadFailed


def build(factory: str) -> Pipeline:
    """Import the function and call it.

    Args:
        factory: `module:function`, or `path/to/file.py:function`.

    Raises:
        LoadFailed: the function is missing, failed, or returned no pipeline.
    """
    place, _, name = factory.rpartition(":")
    try:
        target: Any = _module(place)
        for part in name.split("."):
            target = getattr(target, part)
        pipe = target()
    except Exception as error:  # the user's code may raise anything
        raise LoadFailed(f"--pipeline {factory}: {type(error).__name__}: {error}") from error
    if not isinstance(pipe, Pipeline):
        rule = "it must return a diffusers pipeline"
        raise LoadFailed(f"--pipeline {factory} returned a {type(pipe).__name__}: {rule}")
    return pipe


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
