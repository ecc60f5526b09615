"""What one row of the matrix is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
from diffusers import DiffusionPipeline

from support import torchvision_cpu
from support.tiny.recipes import recipes_of

IMAGE, VIDEO = 2e-5, 1e-4  # the most that riding together may change a value 0-1, float32
READERS = {"qwen_processor", "glm_processor"}  # of pictures, which need torchvision


@dataclass(frozen=True, kw_only=True)
class Case:
    """One family doing one task.

    `requests` are at least four sets of arguments for the pipeline's `__call__`, with a `seed`
    each, laid over `common`. They differ in steps, guidance, prompt length and whatever else the
    task lets differ. The first two must differ in every one of `matters`.
    """

    name: str  # such as "wan21-i2v"; also names the row of the model grid
    family: str = ""  # the tiny checkpoint
    build: Callable[[], DiffusionPipeline] | None = None  # where it is not of diffusers' layout
    task: str  # "text-to-image", "image-to-video", ...
    common: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # of the family's arguments: the task has no such parameter
    requests: tuple[Mapping[str, Any], ...] = ()
    matters: tuple[str, ...] = ("prompt", "seed")  # arguments that must show in the output
    fuses: Mapping[str, float]  # "component.method": the least mean of requests per forward
    alone: tuple[str, ...] = ()  # "component.method": runs, and never fuses
    adapt: Callable[[DiffusionPipeline], DiffusionPipeline] | None = None
    """Another pipeline over the checkpoint's components: image-to-image, ControlNet, ..."""
    is_fast: bool = False  # also part of `make test`
    needs_hy3dgen: bool = False  # `make test-mesh` installs it

    @property
    def tolerance(self) -> float:
        return VIDEO if "video" in self.task or "mesh" in self.task else IMAGE

    @property
    def needs_torchvision(self) -> bool:
        """Whether the checkpoint has a processor of pictures that does."""
        return self.needs_hy3dgen or bool(READERS & {*map(str, recipes_of(self.family).values())})

    def require(self) -> None:
        """Skip the test if a library of this row is missing."""
        if self.needs_torchvision and not torchvision_cpu.IS_THERE:
            pytest.skip("its processor needs torchvision: `make test-models` installs it")
        if self.needs_hy3dgen and not find_spec("hy3dgen"):
            pytest.skip("hy3dgen is not installed: `make test-mesh` does")
