"""Components from elsewhere are those that are served, for every pipeline class that is at hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor
from safetensors.torch import save_file
from torch import Tensor, nn

from carpool.config import EngineSettings
from carpool.engine.model.assembly import read
from carpool.engine.model.conversion import converter_of
from carpool.engine.model.device import Device
from carpool.settings.preparation import is_denoiser
from support import torchvision_cpu
from support.engine_driver import fresh
from support.prepared import gguf_of, own_weights
from support.tiny import FAMILIES, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

QUICK = (
    "flux", "sd3", "sdxl", "sd15", "wan21_i2v", "wan22_t2v_a14b", "zimage", "hunyuan_i2v", "ltx2",
    "sdxl_control", "pixart", "svd",
)  # fmt: skip


def tuned(family: str) -> Iterator[tuple[str, Any]]:
    """The modules of a family, with all weights times 1.5."""
    pipe = fresh(family)
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
def test_every_component_of_a_folder_a_file_or_gguf_is_the_one_that_is_served(
    family: str, tmp_path: Path
) -> None:
    modules = dict(tuned(family))
    folders, files, ggufs = dict[str, Path](), dict[str, Path](), dict[str, Path]()
    for name, module in modules.items():
        folders[name], files[name] = tmp_path / name, tmp_path / f"{name}.safetensors"
        module.save_pretrained(folders[name])
        save_file(own_weights(module), files[name])
        is_read = converter_of(type(module)) is not None
        if is_denoiser(name) and is_read and hasattr(type(module), "from_single_file"):
            ggufs[name] = gguf_of(own_weights(module), tmp_path / f"{name}.gguf")

    for places, tolerance in ((folders, 0.0), (files, 0.0), (ggufs, 0.01)):
        pipe = pipeline(family, places)
        for name in places:
            assert_served(pipe, name, modules[name], tolerance)
