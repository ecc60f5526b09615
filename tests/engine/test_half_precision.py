"""A pipeline in half precision whose VAE must not be: every decode is in float32, for everybody."""

from typing import Any

import pytest
import torch

import carpool
from carpool.config import EngineSettings
from carpool.engine.model.load import load
from support.engine_driver import gap
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.filterwarnings(  # diffusers' Euler scheduler with numpy 2
    "ignore:__array__ implementation:DeprecationWarning"
)


def test_a_vae_that_overflows_in_float16_stays_in_float32_for_good() -> None:
    loaded = load(checkpoint("sdxl"), EngineSettings(device="cpu", dtype="float16"))

    assert loaded.pipe.unet.dtype == torch.float16
    assert loaded.pipe.vae.dtype == torch.float32
    assert loaded.pipe.vae.config.force_upcast is False  # or the pipeline flips it in mid-flight


def test_requests_in_half_precision_get_float32_pictures_together_as_alone() -> None:
    with carpool.load(checkpoint("sdxl"), device="cpu", dtype="float16") as engine:
        together = engine.generate(["a cat", "a dog"], seed=1, **ARGUMENTS["sdxl"])
        alone = [engine.generate(p, seed=1, **ARGUMENTS["sdxl"])[0] for p in ("a cat", "a dog")]

    for one, other in zip(together, alone, strict=True):
        drawn: Any = one.images
        assert drawn.dtype == torch.float32
        assert gap(drawn, other.images) < 0.02  # float16 rounds by company
