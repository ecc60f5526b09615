"""Scaled float8 that other tools write: what a layer's format says decides whether it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.errors import LoadFailed
from support.prepared import own_weights
from support.tiny import checkpoint

LAYERS = ("x_embedder", "context_embedder")
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def own() -> State:
    return own_weights(DiffusionPipeline.from_pretrained(checkpoint("flux")).transformer)


def scaled(own: State) -> tuple[State, State]:
    """Two layers as float8, scaled by row; and the weights that they stand for."""
    file, true = dict(own), dict(own)
    for layer in LAYERS:
        weight = own[f"{layer}.weight"]
        scale = weight.abs().amax(1, keepdim=True) / 448
        file[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        file[f"{layer}.weight_scale"] = scale
        true[f"{layer}.weight"] = file[f"{layer}.weight"].float() * scale
    return file, true


def served(state: State, file: Path, formats: Any = None, component: str = "transformer") -> Any:
    layers = dict.fromkeys(LAYERS, formats)
    note = {"_quantization_metadata": json.dumps({"layers": layers})}
    save_file(state, file, metadata=None if formats is None else note)
    settings = EngineSettings(device="cpu", component=(f"{component}={file}",))
    return getattr(load(checkpoint("flux"), settings).pipe, component)


@pytest.mark.parametrize(
    "formats",
    [
        {"format": "float8_e4m3fn"},
        {"format": "float8_e4m3fn", "full_precision_matrix_mult": True, "convrot": False},
        {"format": "float8_e4m3fn_rowwise"},
        {"format": "float8_e4m3fn_blockwise", "group_size": 1},
    ],
)
def test_layers_of_float8_are_multiplied_by_their_scales(
    formats: Any, own: State, tmp_path: Path
) -> None:
    file, true = scaled(own)

    held = served(file, tmp_path / "file.safetensors", formats).state_dict()

    for name, weight in true.items():
        torch.testing.assert_close(held[name], weight, rtol=0, atol=1e-6, msg=name)


def test_what_else_a_format_says_is_refused_by_name(own: State, tmp_path: Path) -> None:
    formats = {"format": "float8_e4m3fn", "convrot": True}

    with pytest.raises(LoadFailed, match="x_embedder are quantized as float8_e4m3fn with convrot"):
        served(scaled(own)[0], tmp_path / "file.safetensors", formats)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused_by_name(
    scale: float, own: State, tmp_path: Path
) -> None:
    file, _ = scaled(own)
    file["x_embedder.weight_scale"] = torch.tensor(scale)

    with pytest.raises(LoadFailed, match=r"x_embedder\.weight_scale is not finite"):
        served(file, tmp_path / "file.safetensors")


def test_a_tokenizer_beside_names_with_a_prefix_changes_nothing(tmp_path: Path) -> None:
    encoder = own_weights(DiffusionPipeline.from_pretrained(checkpoint("flux")).text_encoder_2)
    state = {f"t5.{name}": weight * 2 for name, weight in encoder.items()}
    state["spiece_model"] = torch.zeros(9, dtype=torch.uint8)

    held = served(state, tmp_path / "t5.safetensors", component="text_encoder_2").state_dict()

    assert all(torch.equal(held[name], weight * 2) for name, weight in encoder.items())
