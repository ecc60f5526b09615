"""Files of LTX-2: its connectors lie under the prefix of its denoiser, and are read with it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.errors import LoadFailed
from support import original_names
from support.engine_driver import fresh, plain
from support.original_names import assert_same
from support.tiny import checkpoint

PARTS = ("transformer", "connectors", "vae", "audio_vae", "vocoder")
UNET = "model.diffusion_model."


@pytest.fixture(scope="module")
def own() -> Any:
    """The pipeline with all weights times 1.5."""
    pipe: Any = fresh("ltx2")
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            for weight in module.parameters():
                weight.data.mul_(1.5)
    return pipe


@pytest.fixture(scope="module")
def weights(own: Any) -> dict[str, Tensor]:
    return original_names.ltx2(own.components)


def served(file: Path) -> Any:
    settings = EngineSettings(device="cpu", model_config=str(checkpoint("ltx2")))
    return load(file, settings).pipe


def test_all_parts_of_a_whole_model_are_served(
    own: Any, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(weights, tmp_path / "ltx2.safetensors")

    assert_same(served(tmp_path / "ltx2.safetensors"), own, *PARTS)


@pytest.mark.parametrize("prefix", [UNET, ""])
def test_a_denoiser_with_its_connectors_is_served_with_them(
    prefix: str, own: Any, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    state = {
        name.replace(UNET, prefix): weight
        for name, weight in weights.items()
        if name.startswith((UNET, "text_embedding_projection."))
    }
    save_file(state, tmp_path / "ltx2.safetensors")

    assert_same(served(tmp_path / "ltx2.safetensors"), own, "transformer", "connectors")


def test_connectors_are_a_component_and_one_that_is_left_in_a_file_is_told(
    own: Any, weights: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ltx2.safetensors"
    save_file(weights, file)
    base = plain("ltx2")

    def pipe(*names: str) -> Any:
        component = tuple(f"{name}={file}" for name in names)
        return load(checkpoint("ltx2"), EngineSettings(device="cpu", component=component)).pipe

    assert_same(pipe("connectors", "vocoder"), own, "connectors", "vocoder")
    with caplog.at_level(logging.WARNING):
        denoiser = pipe("transformer")
    assert_same(denoiser, own, "transformer")
    assert_same(denoiser, base, "connectors")
    assert f"has connectors, too: --component connectors={file} takes them" in caplog.text


def test_connectors_of_another_model_are_refused_by_name(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    more = {"text_embedding_projection.audio_aggregate_embed.weight": torch.zeros(2, 2)}
    save_file({**weights, **more}, tmp_path / "ltx2.safetensors")

    with pytest.raises(LoadFailed, match=r"it has text_embedding_projection\.audio_aggregate"):
        served(tmp_path / "ltx2.safetensors")
