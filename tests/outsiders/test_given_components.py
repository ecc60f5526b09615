"""Components from elsewhere are those that are served, for every pipeline class that is at hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor
from safetensors.torch import save_file
from torch import Tensor, nn

from carpool.config import EngineSettings
from carpool.engine.model.assembly import read
from carpool.engine.model.conversion import converter_of
from carpool.engine.model.device import Device
from carpool.settings.preparation import is_denoiser
from support import torchvision_cpu
from support.prepared import gguf_of, own_weights
from support.tiny import FAMILIES, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

QUICK = (
    "flux", "sd3", "sdxl", "sd15", "wan21_i2v", "wan22_t2v_a14b", "zimage", "hunyuan_i2v", "ltx2",
    "sdxl_control", "pixart", "svd",
)  # fmt: skip


def tuned(family: str) -> Iterator[tuple[str, Any]]:
    """The modules of a family, with all weights times 1.5."""
    pipe = DiffusionPipeline.from_pretrained(checkpoint(family))
    for name, module in pipe.components.items():
        if isinstance(module, nn.Module):
            with torch.no_grad():
                for weight in module.parameters():
                    weight.data.mul_(1.5)
            yield name, module


def pipeline(family: str, component: Mapping[str, Path]) -> Any:
    settings = EngineSettings(
        device="cpu", component=tuple(f"{name}={place}" for name, place in component.items())
    )
    return read(str(checkpoint(family)), settings, Device(settings))


def plain(weight: Tensor) -> Tensor:
    if isinstance(weight, GGUFParameter):
        full: Tensor = dequantize_gguf_tensor(weight).float()
        return full
    return weight


def assert_served(pipe: Any, name: str, module: nn.Module, tolerance: float = 0.0) -> None:
    held = getattr(pipe, name).state_dict()
    own = module.state_dict()
    assert held.keys() == own.keys()
    for key, weight in own.items():
        most = tolerance * float(weight.abs().max()) if weight.numel() else 0.0
        torch.testing.assert_close(plain(held[key]), weight, rtol=0, atol=most, msg=key)


NEEDS_TORCHVISION = ("qwen_edit", "qwen_edit_plus", "qwen_layered")
FAMILY = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
        if torchvision_cpu.IS_THERE or family not in NEEDS_TORCHVISION
    ],
)


@FAMILY
def test_every_component_of_a_folder_is_the_one_that_is_served(family: str, tmp_path: Path) -> None:
    modules = dict(tuned(family))
    for name, module in modules.items():
        module.save_pretrained(tmp_path / name)

    pipe = pipeline(family, {name: tmp_path / name for name in modules})

    for name, module in modules.items():
        assert_served(pipe, name, module)


@FAMILY
def test_every_component_of_a_single_file_is_the_one_that_is_served(
    family: str, tmp_path: Path
) -> None:
    modules = dict(tuned(family))
    for name, module in modules.items():
        save_file(own_weights(module), tmp_path / f"{name}.safetensors")

    pipe = pipeline(family, {name: tmp_path / f"{name}.safetensors" for name in modules})

    for name, module in modules.items():
        assert_served(pipe, name, module)


@FAMILY
def test_a_denoiser_in_gguf_is_the_one_that_is_served(family: str, tmp_path: Path) -> None:
    denoisers = {
        name: module
        for name, module in tuned(family)
        if is_denoiser(name)
        and converter_of(type(module)) is not None
        and hasattr(type(module), "from_single_file")
    }
    for name, module in denoisers.items():
        gguf_of(own_weights(module), tmp_path / f"{name}.gguf")

    pipe = pipeline(family, {name: tmp_path / f"{name}.gguf" for name in denoisers})

    for name, module in denoisers.items():
        assert_served(pipe, name, module, tolerance=0.01)
