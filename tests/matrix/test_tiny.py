"""Tiny checkpoints draw neither flat nor clamped pictures, and rounding stays small in them.

That each argument shows in them is a test of the matrix.
"""

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from support.tiny import ARGUMENTS, FAMILIES, checkpoint

pytestmark = pytest.mark.filterwarnings(  # diffusers' Euler scheduler with numpy 2
    "ignore:__array__ implementation:DeprecationWarning"
)
PROMPTS = {"prompt": "a photo of a cat", "negative_prompt": "blurry, low quality"}
TRUE_CFG = {"flux": {"true_cfg_scale": 3.0}}  # without it a negative prompt is not read


@pytest.fixture(scope="module", params=("flux", "sd3", "sdxl", "sd15"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pipeline(family: str) -> DiffusionPipeline:
    pipeline: DiffusionPipeline = DiffusionPipeline.from_pretrained(checkpoint(family))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def arguments(family: str) -> dict[str, Any]:
    return {**ARGUMENTS[family], **PROMPTS, **TRUE_CFG.get(family, {})}


@pytest.fixture(scope="module")
def image(pipeline: DiffusionPipeline, arguments: dict[str, Any]) -> Tensor:
    return draw(pipeline, **arguments)


def draw(pipeline: DiffusionPipeline, *, seed: int = 0, **arguments: Any) -> Tensor:
    image = pipeline(**arguments, generator=torch.Generator().manual_seed(seed)).images
    assert isinstance(image, Tensor)
    return image


def difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def test_a_second_use_finds_the_checkpoint_of_the_first(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint(family)
    monkeypatch.delitem(FAMILIES, family)

    assert checkpoint(family) == first


def test_an_image_is_neither_clamped_nor_flat(image: Tensor) -> None:
    assert image.isfinite().all()
    assert ((image <= 0) | (image >= 1)).float().mean() < 0.6
    assert image.std() > 0.05


def test_noise_as_small_as_rounding_stays_small(
    pipeline: DiffusionPipeline,
    arguments: dict[str, Any],
    image: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = pipeline.prepare_latents

    def nudged(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        latents, *rest = prepared if isinstance(prepared, tuple) else (prepared,)
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
        latents = latents + 1e-6 * noise
        return (latents, *rest) if rest else latents

    monkeypatch.setattr(pipeline, "prepare_latents", nudged)
    shaken = draw(pipeline, **arguments)

    assert 0 < difference(image, shaken) < 1e-4
