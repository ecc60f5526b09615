"""However a model is prepared, requests that share forwards get what they would get alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from safetensors.torch import load_file, save_file

from carpool.config import EngineSettings
from carpool.engine.model.border import at_border
from carpool.engine.model.compiling import _calls
from carpool.engine.model.load import load
from carpool.errors import LoadFailed, SettingRejected
from support.engine_driver import driving, gap, mean
from support.prepared import alone, drawn, gguf_of, requests_of
from support.tiny import checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",  # diffusers' Euler with numpy 2
    "ignore:.*Quant:FutureWarning",  # quanto goes with diffusers 1.0
    "ignore::UserWarning:torchao",
)
DENOISER = {
    "flux": "transformer", "qwen_image": "transformer", "sdxl": "unet", "wan21_t2v": "transformer",
}  # fmt: skip
CLOSE, HALF = 1e-4, 3e-2  # the most that sharing may change a value 0-1, float32 and bfloat16

Prepared = tuple[str, dict[str, Any], float]
QUICK: dict[str, Prepared] = {
    "flux int8": ("flux", {"quantize": "int8"}, CLOSE),
    "flux fp8": ("flux", {"quantize": "fp8"}, CLOSE),
    "flux quanto": ("flux", {"quantize": "quanto-int8,text_encoder=quanto-int8"}, CLOSE),
    "flux attention": ("flux", {"attention_backend": "_native_math"}, CLOSE),
    "sdxl int8": ("sdxl", {"quantize": "int8,text_encoder_2=int8"}, CLOSE),
    "wan fp8": ("wan21_t2v", {"quantize": "fp8"}, CLOSE),
    "qwen mixed types": ("qwen_image", {"dtype": "float32,transformer=bfloat16"}, HALF),
}
SLOW: dict[str, Prepared] = {
    f"{family} {' '.join(map(str, settings.values()))}": (family, settings, most)
    for family in DENOISER
    for settings, most in (
        ({"quantize": "int8"}, CLOSE),
        ({"quantize": "int8-dynamic", "numerics": "exact"}, 0.0),
        ({"quantize": "fp8", "dtype": "bfloat16"}, HALF),
        ({"quantize": "quanto-int8"}, CLOSE),
        ({"quantize": "quanto-int4"}, CLOSE),
        ({"quantize": "quanto-fp8"}, CLOSE),
        ({"quantize": '{"text_encoder": {"quant_backend": "quanto"}}'}, CLOSE),
        ({"dtype": f"float32,{DENOISER[family]}=bfloat16"}, HALF),
        ({"dtype": "bfloat16,vae=float32"}, HALF),
        ({"vae_tiling": True}, CLOSE),
    )
}


def together_and_alone(
    model: str | Path, family: str, **settings: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Requests with mixed steps and arrivals; what each gets alone; widths of the denoiser."""
    with driving(model, max_running=16, **settings) as drive:
        wanted = requests_of(family)
        solos = [alone(drive.engine.loaded.pipe, one) for one in wanted]
        heard = [drive.submit(**one) for one in wanted[:2]]
        drive.turn_until(lambda: heard[0].step >= 1)
        heard += [drive.submit(**one) for one in wanted[2:]]
        drive.finish()
        for one in heard:
            assert one.error is None
        widths = drive.widths(DENOISER[family])
    return [drawn(one.outcome.fields) for one in heard], solos, widths


@pytest.mark.parametrize(
    "prepared",
    [
        *(pytest.param(one, id=name) for name, one in QUICK.items()),
        *(pytest.param(one, id=name, marks=pytest.mark.slow) for name, one in SLOW.items()),
    ],
)
def test_requests_that_share_forwards_get_what_they_get_alone(prepared: Prepared) -> None:
    family, settings, most = prepared

    heard, solos, widths = together_and_alone(checkpoint(family), family, **settings)

    for one, solo in zip(heard, solos, strict=True):
        assert gap(one, solo) <= most
    assert mean(widths) > 1.4 or most == 0.0  # in exact numerics, what is not proven runs alone


# Attention, tiles: undone, and the process's defaults stay


def test_an_attention_backend_is_set_for_this_model_only_and_taken_back() -> None:
    pipe = DiffusionPipeline.from_pretrained(checkpoint("flux"))
    processor = pipe.transformer.transformer_blocks[0].attn.processor
    query = torch.randn(1, 4, 2, 8)

    loaded = load(pipe, EngineSettings(device="cpu", attention_backend="_native_math"))
    seen = processor._attention_backend
    loaded.undo()

    assert seen == "_native_math"
    assert processor._attention_backend is None
    with pytest.MonkeyPatch.context() as patch:  # the default of models that are built later
        patch.setattr("torch.backends.cuda.sdp_kernel", None, raising=False)
        from diffusers.models import attention_dispatch

        assert attention_dispatch._AttentionBackendRegistry._active_backend == "native"
    assert dispatch_attention_fn(query, query, query).shape == query.shape


@pytest.mark.parametrize("backend", ["_native_cudnn", "_native_efficient"])
def test_an_attention_backend_that_cannot_run_here_is_refused_at_the_start(backend: str) -> None:
    pipe = DiffusionPipeline.from_pretrained(checkpoint("flux"))

    with pytest.raises(
        SettingRejected, match=r"does not run on cpu in torch\.float32.*take native"
    ):
        load(pipe, EngineSettings(device="cpu", attention_backend=backend))

    processor = pipe.transformer.transformer_blocks[0].attn.processor
    assert processor._attention_backend is None  # taken back


def test_a_model_that_needs_a_picture_is_warmed_up_with_one() -> None:
    given: list[dict[str, Any]] = []

    class Animates:
        def __call__(self, image: Any, prompt: Any, width: int = 0, height: int = 0) -> None:
            given.append({"image": image, "prompt": prompt, "width": width})

    for call in _calls(Animates(), [(64, 32), (0, 0)]):
        call()

    assert [one["image"].size for one in given] == [(64, 32)] * 2 + [(512, 512)] * 2
    assert all(isinstance(one["prompt"], str) for one in given)  # not every one takes lists


def test_large_pictures_are_decoded_by_tiles() -> None:
    pipe = DiffusionPipeline.from_pretrained(checkpoint("flux"))
    latents = torch.randn(1, pipe.vae.config.latent_channels, 48, 48)
    with torch.no_grad():
        whole = pipe.vae.decode(latents).sample
        pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 16, 32

        loaded = load(pipe, EngineSettings(device="cpu", vae_tiling=True))
        tiled = pipe.vae.decode(latents).sample
        loaded.undo()

        assert not torch.equal(tiled, whole)
        assert torch.equal(pipe.vae.decode(latents).sample, whole)


# Components from elsewhere, and models that are one file


@pytest.fixture(scope="module")
def flux_weights() -> dict[str, torch.Tensor]:
    [file] = (checkpoint("flux") / "transformer").glob("*.safetensors")
    return dict(load_file(file))


@pytest.fixture(scope="module")
def other_flux(tmp_path_factory: pytest.TempPathFactory, flux_weights: Any) -> Path:
    """A fine-tuned transformer, as one file."""
    file = tmp_path_factory.mktemp("tuned") / "tuned.safetensors"
    save_file({name: weight * 1.1 for name, weight in flux_weights.items()}, file)
    return file


def test_requests_over_a_gguf_file_share_forwards_and_get_what_they_get_alone(
    tmp_path: Path, flux_weights: Any
) -> None:
    file = gguf_of(flux_weights, tmp_path / "flux-Q8_0.gguf")

    heard, solos, widths = together_and_alone(
        checkpoint("flux"), "flux", component=(f"transformer={file}",)
    )

    assert max(gap(one, solo) for one, solo in zip(heard, solos, strict=True)) <= CLOSE
    assert mean(widths) > 1.4


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_a_model_may_be_one_file_with_the_rest_from_elsewhere(
    suffix: str, tmp_path: Path, flux_weights: Any, other_flux: Path
) -> None:
    file = other_flux if suffix == "safetensors" else tmp_path / "flux.gguf"
    if suffix == "gguf":
        gguf_of(flux_weights, file)
    settings = EngineSettings(device="cpu", model_config=str(checkpoint("flux")))

    loaded = load(file, settings)

    assert isinstance(loaded.pipe.transformer, FluxTransformer2DModel)
    assert loaded.card.id == file.stem
    image = alone(loaded.pipe, requests_of("flux")[0])
    assert bool(np.isfinite(image.numpy()).all())


def test_a_file_whose_configuration_must_be_fetched_says_which_was_inferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = tmp_path / "flux1-dev.safetensors"
    weights = {
        "double_blocks.0.img_attn.norm.key_norm.scale": torch.zeros(128),
        "img_in.weight": torch.zeros(3072, 64),
        "guidance_in.in_layer.bias": torch.zeros(3072),
    }
    save_file(weights, file)

    with pytest.raises(LoadFailed) as failed:
        load(file, EngineSettings(device="cpu"))

    assert "was inferred; --model-config gives another: black-forest-labs/FLUX.1-dev" in str(
        failed.value
    )


@pytest.mark.parametrize(
    ("component", "told"),
    [
        ("transformer=/nowhere.safetensors", "there is no such file"),
        ("transformer=/nowhere", "there is no such folder"),
        ("transfomer=/nowhere", "no component 'transfomer'; did you mean 'transformer'?"),
        ("tokenizer=/nowhere", "no component 'tokenizer'; it has text_encoder"),
    ],
)
def test_a_component_that_is_not_to_be_had_is_told(component: str, told: str) -> None:
    with pytest.raises((LoadFailed, SettingRejected)) as failed:
        load(checkpoint("flux"), EngineSettings(device="cpu", component=(component,)))

    assert told in str(failed.value)


@pytest.mark.parametrize("where", ["some/vae", "some/model/vae.safetensors"])
def test_a_component_of_a_hub_that_cannot_be_reached_is_told_with_what_to_do(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://localhost:9")

    with pytest.raises(LoadFailed) as failed:
        load(checkpoint("flux"), EngineSettings(device="cpu", component=(f"vae={where}",)))

    assert "http://localhost:9 cannot be reached" in str(failed.value)
    assert "fetch it elsewhere with `hf download some/" in str(failed.value)


# Devices and number types of single components


def test_what_enters_a_module_is_moved_and_cast_but_no_step_or_place_is_rounded() -> None:
    seen: dict[str, torch.Tensor] = {}

    def forward(x: torch.Tensor, timestep: torch.Tensor, ids: Any = None) -> Any:
        seen.update(x=x, timestep=timestep, ids=ids[0])
        return {"sample": x}

    meta, names = torch.device("meta"), ("x", "timestep", "ids")
    entered = at_border(forward, names, device=meta, dtype=torch.bfloat16)
    answered = at_border(forward, names, home=meta)

    entered(torch.ones(2), torch.tensor(999.3), ids=[torch.ones(2, dtype=torch.int64)])
    types = {name: one.dtype for name, one in seen.items()}
    devices = {one.device.type for one in seen.values()}
    answer = answered(torch.ones(2), torch.tensor(1.0), [torch.ones(2)])

    assert types == {"x": torch.bfloat16, "timestep": torch.float32, "ids": torch.int64}
    assert devices == {"meta"}
    assert answer["sample"].device == meta


def test_components_that_are_placed_share_forwards_and_are_given_back() -> None:
    heard, solos, widths = together_and_alone(
        checkpoint("flux"), "flux", place="text_encoder=cpu:0,vae=cpu"
    )

    assert max(gap(one, solo) for one, solo in zip(heard, solos, strict=True)) <= CLOSE
    assert mean(widths) > 1.4
    pipe = DiffusionPipeline.from_pretrained(checkpoint("flux"))
    load(pipe, EngineSettings(device="cpu", place="vae=cpu")).undo()
    assert not {"encode", "decode", "forward"} & vars(pipe.vae).keys()


def test_a_device_that_is_not_there_and_adapters_beside_places_are_refused() -> None:
    with pytest.raises(SettingRejected, match="place=vae=cuda:7: no such device here"):
        load(checkpoint("flux"), EngineSettings(device="cpu", place="vae=cuda:7"))
    with pytest.raises(SettingRejected, match="leave one of them out"):
        load(checkpoint("flux"), EngineSettings(device="cpu", place="vae=cpu", lora=("a=b",)))
