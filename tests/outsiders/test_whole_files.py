"""Models of one file: what the file holds is drawn, what it lacks comes from the configuration's
pipeline, and its marks set the scheduler."""

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler, PNDMScheduler
from safetensors.torch import save_file
from torch import Tensor, nn

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.errors import LoadFailed
from support import original_names
from support.engine_driver import fresh, gap, plain
from support.original_names import assert_same
from support.prepared import alone, requests_of
from support.tiny import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CLOSE = 1e-4
VAE, UNET = "first_stage_model.", "model.diffusion_model."
TEXTS = ("cond_stage_model.", "conditioner.")


@cache
def tuned(family: str) -> Any:
    """A family's pipeline with other weights, for all tests."""
    pipe: Any = fresh(family)
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            for weight in module.parameters():
                weight.data.mul_(1.1)
    return pipe


def whole(
    family: str, file: Path, without: tuple[str, ...] = (), more: Mapping[str, Tensor] | None = None
) -> Any:
    """Write a family's weights, changed, as one file; returns the pipeline that they are of."""
    pipe = tuned(family)
    weights = original_names.whole(pipe.components)
    kept = {name: weight for name, weight in weights.items() if not name.startswith(without or "-")}
    save_file({**kept, **(more or {})}, file)
    return pipe


def served(family: str, file: Path, **settings: Any) -> Any:
    settings = {"device": "cpu", "model_config": str(checkpoint(family)), **settings}
    return load(file, EngineSettings(**settings)).pipe


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_whole_model_draws_what_it_holds(family: str, tmp_path: Path) -> None:
    own = whole(family, tmp_path / "model.safetensors")
    request = requests_of(family)[0]

    pipe = served(family, tmp_path / "model.safetensors")

    with torch.no_grad():
        assert gap(alone(pipe, request), alone(own, request)) <= CLOSE


@pytest.mark.parametrize(
    ("without", "lacks"),
    [
        ((VAE,), ["vae"]),
        (TEXTS, ["text_encoder", "text_encoder_2"]),
        (("conditioner.embedders.1.",), ["text_encoder_2"]),
        (("conditioner.embedders.0.",), ["text_encoder"]),
        ((VAE, *TEXTS), ["vae", "text_encoder", "text_encoder_2"]),
    ],
)
def test_what_a_file_lacks_comes_from_the_pipeline_of_its_configuration(
    without: tuple[str, ...], lacks: list[str], tmp_path: Path
) -> None:
    own = whole("sdxl", tmp_path / "model.safetensors", without)
    base = plain("sdxl")

    pipe = served("sdxl", tmp_path / "model.safetensors")

    names = ("unet", "vae", "text_encoder", "text_encoder_2")
    assert_same(pipe, own, *(name for name in names if name not in lacks))
    assert_same(pipe, base, *lacks)


def test_what_neither_has_is_refused_in_one_line(tmp_path: Path) -> None:
    whole("sdxl", tmp_path / "model.safetensors", (VAE,))
    folder = tmp_path / "configuration"
    for file in checkpoint("sdxl").rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            (folder / file.relative_to(checkpoint("sdxl"))).parent.mkdir(
                parents=True, exist_ok=True
            )
            (folder / file.relative_to(checkpoint("sdxl"))).write_bytes(file.read_bytes())

    with pytest.raises(LoadFailed, match="has no weights of vae as") as failed:
        served("sdxl", tmp_path / "model.safetensors", model_config=str(folder))
    assert "say --component vae=FILE" in str(failed.value)
    assert "\n" not in str(failed.value)
    whole("sdxl", tmp_path / "model.safetensors")
    assert served("sdxl", tmp_path / "model.safetensors", model_config=str(folder))


def test_one_type_of_numbers_for_each_component_of_a_file(tmp_path: Path) -> None:
    whole("sdxl", tmp_path / "model.safetensors")

    pipe = served("sdxl", tmp_path / "model.safetensors", dtype="bfloat16,vae=float32")

    assert (pipe.unet.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float32)
    assert pipe.text_encoder.dtype == torch.bfloat16


def test_a_part_that_no_component_takes_is_refused_by_name(tmp_path: Path) -> None:
    more = {"conditioner.embedders.3.weight": torch.zeros(2), "odd": torch.zeros(1)}
    whole("sdxl", tmp_path / "model.safetensors", more=more)

    with pytest.raises(LoadFailed, match=r"it has (odd|conditioner\S+) and 1 more, which none of"):
        served("sdxl", tmp_path / "model.safetensors")


def test_training_leftovers_of_a_whole_model_may_stay(tmp_path: Path) -> None:
    more = {
        "alphas_cumprod": torch.zeros(4),
        "betas": torch.zeros(4),
        "sqrt_one_minus_alphas_cumprod": torch.zeros(4),
        "model_ema.decay": torch.zeros(()),
        "denoiser.sigmas": torch.zeros(3),
        "first_stage_model.loss.logvar": torch.zeros(()),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.zeros(1, 7),
    }
    own = whole("sd15", tmp_path / "model.safetensors", more=more)

    assert_same(served("sd15", tmp_path / "model.safetensors"), own, "unet", "vae", "text_encoder")


# Marks


ZERO_SNR = {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}


@pytest.mark.parametrize("place", ["model", "component", "prefixed"])
def test_v_pred_and_ztsnr_set_the_scheduler_and_draw_what_plain_diffusers_draws(
    place: str, tmp_path: Path
) -> None:
    prefix = UNET if place == "prefixed" else ""
    more = {prefix + name: weight for name, weight in ZERO_SNR.items()}
    own = copy.copy(whole("sdxl", tmp_path / "v.safetensors", more=more))
    own.scheduler = EulerDiscreteScheduler.from_config(
        own.scheduler.config, prediction_type="v_prediction", rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )  # fmt: skip
    request = requests_of("sdxl")[0]

    if place == "component":
        names = ("unet", "vae", "text_encoder", "text_encoder_2")
        component = tuple(f"{name}={tmp_path / 'v.safetensors'}" for name in names)
        pipe = load(checkpoint("sdxl"), EngineSettings(device="cpu", component=component)).pipe
    else:
        pipe = served("sdxl", tmp_path / "v.safetensors")

    assert type(pipe.scheduler) is type(own.scheduler)
    with torch.no_grad():
        assert gap(alone(pipe, request), alone(own, request)) <= CLOSE


def test_a_scheduler_that_cannot_end_at_zero_signal_is_replaced(tmp_path: Path) -> None:
    base = fresh("sd15")
    base.scheduler = PNDMScheduler.from_config(base.scheduler.config)
    base.save_pretrained(tmp_path / "base")
    whole("sd15", tmp_path / "v.safetensors", more=ZERO_SNR)
    whole("sd15", tmp_path / "only_v.safetensors", more={"v_pred": torch.tensor([])})

    both = served("sd15", tmp_path / "v.safetensors", model_config=str(tmp_path / "base"))
    one = served("sd15", tmp_path / "only_v.safetensors", model_config=str(tmp_path / "base"))

    assert both.scheduler.config.rescale_betas_zero_snr
    assert both.scheduler.config.prediction_type == "v_prediction"
    assert isinstance(one.scheduler, PNDMScheduler)
    assert one.scheduler.config.prediction_type == "v_prediction"


def test_a_header_that_names_the_prediction_is_honoured(tmp_path: Path) -> None:
    weights = original_names.whole(tuned("sdxl").components)
    for said, wanted in {"v": "v_prediction", "epsilon": "epsilon"}.items():
        file = tmp_path / f"{said}.safetensors"
        save_file(weights, file, metadata={"modelspec.prediction_type": said})

        assert served("sdxl", file).scheduler.config.prediction_type == wanted


def test_marks_of_models_in_the_manner_of_edm_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("edm_mean", "edm_vpred.sigma_max"):
        whole("sdxl", tmp_path / "edm.safetensors", more={name: torch.tensor([120.0])})

        with pytest.raises(LoadFailed, match=rf"mark {name}=\[120.0\]"):
            served("sdxl", tmp_path / "edm.safetensors")


def test_marks_on_a_model_whose_scheduler_has_none_are_refused(tmp_path: Path) -> None:
    [file] = (checkpoint("flux") / "transformer").glob("*.safetensors")
    from safetensors.torch import load_file

    save_file({**load_file(file), "v_pred": torch.tensor([])}, tmp_path / "v.safetensors")

    with pytest.raises(LoadFailed, match="marks v_pred, and FlowMatchEulerDiscreteScheduler"):
        served("flux", tmp_path / "v.safetensors")


# Which component, and which configuration


def test_a_file_in_a_pipelines_folder_has_its_configuration() -> None:
    [file] = (checkpoint("flux") / "transformer").glob("*.safetensors")

    pipe = load(file, EngineSettings(device="cpu")).pipe

    assert type(pipe).__name__ == "FluxPipeline"


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("wan2.2_t2v_high_noise_14B", "transformer"), ("wan2.2_t2v_low_noise_14B", "transformer_2"),
        ("Wan2.2-T2V-LowNoise", "transformer_2"), ("tuned", "transformer"),
    ],
)  # fmt: skip
def test_a_file_of_one_of_two_experts_takes_its_place(
    name: str, component: str, tmp_path: Path
) -> None:
    base = plain("wan22_t2v_a14b")
    weights = {n: w * 1.5 for n, w in base.transformer.state_dict().items()}
    save_file(weights, tmp_path / f"{name}.safetensors")

    pipe = served("wan22_t2v_a14b", tmp_path / f"{name}.safetensors")

    other = "transformer_2" if component == "transformer" else "transformer"
    for key, weight in weights.items():
        assert torch.equal(getattr(pipe, component).state_dict()[key], weight), key
    assert_same(pipe, base, other)


def test_a_file_without_a_denoiser_is_no_model(tmp_path: Path) -> None:
    whole("sdxl", tmp_path / "vae.safetensors", (UNET, *TEXTS))

    with pytest.raises(LoadFailed, match=r"it holds vae and no unet: say --component"):
        served("sdxl", tmp_path / "vae.safetensors")
