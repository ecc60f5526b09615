"""Tiny pipelines of diffusers' own tests, from a checkout of its repository.

`DIFFUSERS_CHECKOUT` names the folder. Nothing of it is part of this project: its tests know a tiny
configuration and legal arguments of almost every pipeline, and are imported from there. Several
folders may be named, with colons between them: of a class the first that tests it counts, so that
an older release adds the classes whose tests were taken out since. What the tests would fetch from
the hub is replaced by parts made here (`stand_ins`).
"""

import contextlib
import copy
import importlib
import inspect
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from support import more_pipelines, stand_ins
from support.isolation import build

FOLDERS = [one for one in os.environ.get("DIFFUSERS_CHECKOUT", "").split(":") if one]


@cache
def configurations() -> dict[str, Any]:
    """Diffusers' test classes that know how to build a pipeline and call it, by pipeline class."""
    if not FOLDERS:
        return {}
    stand_ins.install()
    _find_moved_packages()
    found: dict[str, Any] = {}
    ours, theirs = _taken_modules(), dict[str, Any]()
    for folder in FOLDERS:
        sys.path.insert(0, folder)
        for test in _tests(folder):
            cls = getattr(test, "pipeline_class", None)
            if inspect.isclass(cls) and _builds(test):
                bases = [base.__name__ for base in cls.__mro__ if hasattr(diffusers, base.__name__)]
                if bases:
                    found.setdefault(bases[0], test)
        sys.path.remove(folder)
        theirs = _taken_modules() | theirs
    sys.modules.update(theirs | ours)
    for name, make in more_pipelines.DERIVED.items():
        found[name] = lambda make=make: make(lambda of: found[of]())
    return found


def _taken_modules() -> dict[str, Any]:
    """The modules of `tests`, taken away: diffusers' import each other by the name of ours."""
    names = [one for one in sys.modules if one.partition(".")[0] == "tests"]
    return {name: sys.modules.pop(name) for name in names}


def _tests(folder: str) -> Iterator[Any]:
    """The classes in the files of a checkout's tests of pipelines, as far as they can be read."""
    for file in sorted(Path(folder, "tests", "pipelines").rglob("test_*.py")):
        name = ".".join(file.relative_to(folder).with_suffix("").parts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except (ImportError, AttributeError):  # of a library that is missing, or another release
            continue
        own = [one for one in vars(module).values() if getattr(one, "__module__", "") == name]
        yield from filter(inspect.isclass, own)


def _builds(test: Any) -> bool:
    """Whether a test class makes a pipeline's components without being told more."""
    make = getattr(test, "get_dummy_components", None)
    if make is None:
        return False
    given = list(inspect.signature(make).parameters.values())[1:]
    return all(one.default is not one.empty or one.kind is one.VAR_KEYWORD for one in given)


def _find_moved_packages() -> None:
    """Packages of old pipelines by the names that they had before they were deprecated."""
    moved = importlib.import_module("diffusers.pipelines.deprecated")
    for one in pkgutil.walk_packages(moved.__path__, f"{moved.__name__}."):
        with contextlib.suppress(ImportError, RuntimeError):
            known = importlib.import_module(one.name)
            sys.modules.setdefault(one.name.replace(".deprecated", ""), known)


def _without_ftfy(pipe: Any) -> None:
    """Prompts of a pipeline are cleaned without ftfy, which is not installed."""
    vars(sys.modules[type(pipe).__module__]).setdefault("ftfy", SimpleNamespace(fix_text=str))


def pipeline(name: str) -> Any:
    """A pipeline with the same weights at every call; layers that begin at zero are drawn."""

    def make() -> Any:
        test = configurations()[name]()
        pipe = test.pipeline_class(**test.get_dummy_components())
        _without_ftfy(pipe)
        drawn = torch.Generator().manual_seed(7)
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                if "kolors" in type(component).__module__:  # its layers begin as memory was
                    for weight in component.parameters():
                        nn.init.normal_(weight, std=0.05, generator=drawn)
                for part in component.requires_grad_(False).modules():
                    _draw(part, drawn)
        return pipe

    return build(make)


def _draw(part: nn.Module, generator: torch.Generator) -> None:
    if not isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    with torch.no_grad():
        if not part.weight.any():
            part.weight.normal_(std=part.weight[0].numel() ** -0.5, generator=generator)
        if part.bias is not None and not part.bias.any():
            part.bias.normal_(std=0.05, generator=generator)


def requests(name: str) -> list[dict[str, Any]]:
    """Five calls with other steps, guidance and prompts, from the arguments of diffusers' test."""
    test = configurations()[name]()
    takes_device = "device" in inspect.signature(test.get_dummy_inputs).parameters
    given = test.get_dummy_inputs("cpu") if takes_device else test.get_dummy_inputs()
    given.pop("generator", None)
    if given.get("output_type") == "numpy":  # as it was called once; diffusers warns of it
        given["output_type"] = "np"
    steps, prompt = given.get("num_inference_steps"), given.get("prompt")
    scale = next((n for n in ("guidance_scale", "true_cfg_scale") if n in given), None)
    other: dict[str, Any] = {}
    longer: dict[str, Any] = {}
    if isinstance(prompt, str) and prompt:  # else its encoder may know a few words only
        other["prompt"] = " ".join(["a", *prompt.split()[1:]])
        longer["prompt"] = f"{prompt} by the sea with a hat"

    def more(count: int) -> dict[str, Any]:
        is_free = isinstance(steps, int) and "image_latents" not in given  # else one for each step
        return {"num_inference_steps": steps + count} if is_free else {}

    guided, unguided = ({scale: given[scale] + 1.5}, {scale: 1.0}) if scale else ({}, {})
    changes: tuple[dict[str, Any], ...] = (
        {}, {**more(1), **other}, guided, {**more(2), **unguided, **other}, {**more(1), **longer},
    )  # fmt: skip
    return [copy.deepcopy({**given, **one}) for one in changes]


def tensors(value: Any) -> Iterator[Tensor]:
    """All numbers and pictures in an output, in order."""
    if isinstance(value, Tensor):
        yield value.detach().double()
    elif isinstance(value, np.ndarray):
        yield torch.as_tensor(value.astype(np.float64))
    elif isinstance(value, Image.Image):
        yield torch.as_tensor(np.asarray(value).astype(np.float64) / 255)
    elif hasattr(value, "values"):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif hasattr(value, "__dict__"):  # a mesh
        yield from tensors(vars(value))
