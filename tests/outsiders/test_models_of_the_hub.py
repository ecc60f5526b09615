"""Models in the hub's cache, and modular ones, are read whole: no weight is drawn at random."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.errors import LoadFailed
from support.engine_driver import plain
from support.modular import modular
from support.tiny import checkpoint

Cached = Callable[[Path], Path]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cached:
    """Put a folder into a cache of the hub's, as `org/model`; returns its snapshot."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(folder: Path) -> Path:
        place, commit = tmp_path / "hub" / "models--org--model", "5" * 40
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(commit)
        shutil.copytree(folder, place / "snapshots" / commit)
        return place / "snapshots" / commit

    return put


def without_one(folder: Path) -> str:
    """Take a weight out of a component's folder; returns its name."""
    [file] = folder.glob("*.safetensors")
    state = load_file(file)
    name: str = next(name for name in state if state[name].ndim == 2 and "embed" not in name)
    del state[name]
    save_file(state, file, metadata={"format": "pt"})
    return name


def with_one(folder: Path) -> str:
    [file] = folder.glob("*.safetensors")
    save_file({**load_file(file), "odd.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    return "odd.weight"


def served(model: str | Path, *component: str) -> Any:
    return load(model, EngineSettings(device="cpu", component=component)).pipe


def test_a_model_of_the_hub_is_that_of_plain_diffusers(cached: Cached) -> None:
    place = cached(checkpoint("flux"))
    for part, rule in (("..", r"it is in the hub's cache: give the id 'org/model', or '.*5'"),
                       ("../../refs/main", "the id 'org/model'")):  # fmt: skip
        with pytest.raises(LoadFailed, match=rule):
            served(place / part)
    own = DiffusionPipeline.from_pretrained("org/model")

    pipe = served("org/model")

    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        held = getattr(pipe, name).state_dict()
        assert all(torch.equal(held[k], w) for k, w in getattr(own, name).state_dict().items())


@pytest.mark.parametrize(
    ("change", "told", "component"),
    [(without_one, "lacks", "transformer"), (with_one, "has", "text_encoder_2")],
)
def test_a_model_of_the_hub_with_a_weight_too_few_or_too_many_is_refused_by_name(
    change: Callable[[Path], str], told: str, component: str, cached: Cached
) -> None:
    name = change(cached(checkpoint("flux")) / component)

    with pytest.raises(LoadFailed, match=rf"{component} of .*: it {told} {name}, which"):
        served("org/model")

    given = served("org/model", f"{component}={checkpoint('flux')}")
    own = getattr(plain("flux"), component)
    assert all(
        torch.equal(own.state_dict()[key], w)
        for key, w in getattr(given, component).state_dict().items()
    )


def test_what_is_replaced_of_a_model_of_the_hub_need_not_be_in_the_cache(cached: Cached) -> None:
    shutil.rmtree(cached(checkpoint("flux")) / "vae")

    pipe = served("org/model", f"vae={checkpoint('flux')}")

    assert type(pipe.vae).__name__ == "AutoencoderKL"


@pytest.mark.parametrize(("change", "told"), [(without_one, "lacks"), (with_one, "has")])
def test_a_modular_model_with_a_weight_too_few_or_too_many_is_refused_by_name(
    change: Callable[[Path], str], told: str, tmp_path: Path
) -> None:
    modular("Flux2KleinBaseModularPipeline").save_pretrained(str(tmp_path / "model"))
    assert served(tmp_path / "model")
    name = change(tmp_path / "model" / "transformer")

    with pytest.raises(LoadFailed, match=rf"transformer of .*: it {told} {name}, which"):
        served(tmp_path / "model")
