"""Quantized weights: which components have them, from which files, and whether rows stay apart."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file

from carpool.config import EngineSettings
from carpool.engine.intercept import Interception
from carpool.engine.model.load import load
from carpool.engine.model.quantize import READ_METHODS, quantize_read, quantized_components
from carpool.engine.row_mixing import mixes_rows
from carpool.errors import LoadFailed, SettingRejected
from carpool.settings.quantization import KINDS, Quantization
from support import original_names
from support.engine_driver import driving, gap, mean
from support.prepared import alone, drawn, gguf_of, requests_of
from support.tiny import checkpoint

pytestmark = [
    pytest.mark.timeout(300),  # in slow ones quanto compiles C++
    pytest.mark.filterwarnings(
        "ignore:.*Quant:FutureWarning",  # quanto goes with diffusers 1.0
        "ignore::UserWarning:torchao",
    ),
]
PER_TENSOR = (
    '{"transformer": {"quant_backend": "torchao", '
    '"quant_type": "Int8DynamicActivationInt8WeightConfig", '
    '"quant_kwargs": {"granularity": "PerTensor"}}}'
)


@pytest.fixture(autouse=True)
def unpacked_by_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quanto's own function unpacks 4 bits, but in slow tests: those compile its C++ of the same,
    for a minute, once for each environment."""
    if "slow" not in request.keywords:
        from optimum.quanto.library.extensions import get_extension
        from optimum.quanto.library.unpack import unpack

        compiled = SimpleNamespace(unpack=unpack)
        monkeypatch.setattr(get_extension("quanto_cpp"), "_lib", compiled)


def weight_types(module: torch.nn.Module) -> set[str]:
    return {
        type(weight).__name__ if weight.dtype != torch.float8_e4m3fn else "float8"
        for weight in module.parameters()
    }


@pytest.mark.parametrize(
    ("quantize", "holds"),
    [
        ("int8", {"transformer": "Int8Tensor"}),
        ("fp8", {"transformer": "float8"}),
        ("quanto-int4", {"transformer": "WeightQBitsTensor"}),
        (
            "transformer=int8,text_encoder_2=quanto-int8",
            {"transformer": "Int8Tensor", "text_encoder_2": "WeightQBytesTensor"},
        ),
        (
            '{"text_encoder": {"quant_backend":"torchao", "quant_type":"Float8WeightOnlyConfig"}}',
            {"text_encoder": "Float8Tensor"},
        ),
    ],
)
def test_the_weights_of_the_named_components_are_quantized_and_no_others(
    quantize: str, holds: Mapping[str, str]
) -> None:
    loaded = load(checkpoint("flux"), EngineSettings(device="cpu", quantize=quantize))

    for name, module in loaded.modules.items():
        found = weight_types(module) - {"Parameter"}
        assert found == ({holds[name]} if name in holds else set()), name


# Single files, which the libraries do not quantize while they read them


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer as one file."""
    [weights] = (checkpoint("flux") / "transformer").glob("*.safetensors")
    file = tmp_path_factory.mktemp("tuned") / "tuned.safetensors"
    save_file(load_file(weights), file)
    return file


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("int8", "Int8Tensor"),
        # compiles: see `unpacked_by_torch`
        pytest.param("quanto-int4", "WeightQBitsTensor", marks=pytest.mark.slow),
    ],
)
def test_a_component_of_a_single_file_is_quantized_like_one_of_a_folder(
    kind: str, holds: str, tuned: Path
) -> None:
    wanted = requests_of("flux")[0]
    pictures = []
    for component in ((), (f"transformer={tuned}",)):
        settings = EngineSettings(device="cpu", component=component, quantize=kind)
        loaded = load(checkpoint("flux"), settings)
        assert holds in weight_types(loaded.pipe.transformer)
        pictures.append(alone(loaded.pipe, wanted))

    assert gap(*pictures) <= 1e-5


def test_a_whole_model_of_one_file_is_quantized_after_it_was_read(tmp_path: Path) -> None:
    pipe = StableDiffusionXLPipeline.from_pretrained(checkpoint("sdxl"))
    save_file(original_names.whole(pipe.components), tmp_path / "xl.safetensors")
    settings = EngineSettings(
        device="cpu", model_config=str(checkpoint("sdxl")), quantize="unet=int8,text_encoder=int8"
    )

    loaded = load(tmp_path / "xl.safetensors", settings)

    assert "Int8Tensor" in weight_types(loaded.pipe.unet)
    assert "Int8Tensor" in weight_types(loaded.pipe.text_encoder)
    assert weight_types(loaded.pipe.vae) == {"Parameter"}


@pytest.mark.parametrize("kind", ["int8", "quanto-int8"])
def test_layers_that_a_class_keeps_in_float32_are_not_quantized(kind: str) -> None:
    module = torch.nn.Sequential()
    for name in ("first", "last"):
        module.add_module(name, torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)))
    module._keep_in_fp32_modules = ["last"]  # type: ignore[assignment]

    quantize_read(module, KINDS[kind], torch.float32)

    assert weight_types(module[0]) != {"Parameter"}
    assert weight_types(module[1]) == {"Parameter"}


@pytest.mark.parametrize("kind", ["int8", "fp8", "transformer=quanto-int8"])
def test_what_a_gguf_file_has_quantized_is_not_quantized_again(kind: str, tmp_path: Path) -> None:
    [weights] = (checkpoint("flux") / "transformer").glob("*.safetensors")
    file = gguf_of(load_file(weights), tmp_path / "flux.gguf")
    config = str(checkpoint("flux"))
    told = "the file's weights are quantized, and quantize has transformer too"

    with pytest.raises(SettingRejected, match=told):
        EngineSettings(device="cpu", component=(f"transformer={file}",), quantize=kind)
    with pytest.raises(SettingRejected, match=told):
        load(file, EngineSettings(device="cpu", model_config=config, quantize=kind))


# What does not run on a CPU is told before anything is read


@pytest.mark.parametrize(("kind", "instead"), [("int4", "quanto-int4"), ("fp8-dynamic", "fp8")])
def test_a_kind_that_needs_a_gpu_is_refused_where_the_device_turns_out_to_be_a_cpu(
    kind: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    settings = EngineSettings(device="auto", quantize=kind)

    with pytest.raises(SettingRejected, match=f"needs a GPU; on a CPU take {instead}"):
        load(checkpoint("flux"), settings)


def test_what_a_quantizer_raises_is_told_as_a_failure_to_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(*_: Any, **__: Any) -> None:
        raise AssertionError("only bfloat16 is supported")

    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", lacks)

    with pytest.raises(LoadFailed, match=r"cannot load .*: only bfloat16 is supported"):
        load(checkpoint("flux"), EngineSettings(device="cpu", quantize="int8"))


# Rows that change each other


class Scaled(torch.nn.Linear):
    """A quantized layer as nobody has it yet: one scale of the activations of all rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


class RowScaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


def test_a_layer_whose_rows_change_each_other_is_found_by_trying_it() -> None:
    assert "a row of its Scaled" in str(mixes_rows(torch.nn.Sequential(Scaled(64, 8))))
    assert mixes_rows(torch.nn.Sequential(RowScaled(64, 8))) is None
    assert mixes_rows(torch.nn.Sequential(torch.nn.Linear(64, 8))) is None
    nowhere = Scaled(64, 8).requires_grad_(False)
    nowhere.weight.fill_(torch.nan)  # of a block that is streamed
    assert mixes_rows(torch.nn.Sequential(nowhere)) is None


@pytest.mark.parametrize(
    "kind", [name for name, one in KINDS.items() if one.backend in ("torchao", "quanto")]
)
def test_rows_of_quantized_layers_that_share_forwards_do_not_change_each_other(kind: str) -> None:
    if KINDS[kind].needs_gpu:
        pytest.skip("torchao computes with it on GPUs only")
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32)).requires_grad_(False)
    quantize_read(layer, KINDS[kind], torch.float32)

    assert mixes_rows(layer) is None


def test_one_scale_of_all_rows_is_seen_in_real_layers_and_in_streamed_ones() -> None:
    options = {
        "quant_type": "Int8DynamicActivationInt8WeightConfig",
        "quant_kwargs": {"granularity": "PerTensor"},
    }
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32)).requires_grad_(False)
    quantize_read(layer, Quantization("torchao", options), torch.float32)

    assert "one scale of all rows" in str(mixes_rows(layer))


def test_calls_of_a_module_that_mixes_rows_run_alone() -> None:
    with driving(checkpoint("flux"), max_running=4) as probe:
        block = probe.engine.loaded.pipe.transformer.transformer_blocks[0]
        block.add_module("quantized", Scaled(4, 4))
        targets = Interception(probe.engine.loaded.modules).targets

    assert {one.component for one in targets if one.is_exclusive} == {"transformer"}


@pytest.mark.slow
def test_requests_of_a_model_with_one_scale_of_all_rows_get_what_they_get_alone() -> None:
    wanted = requests_of("flux")
    with driving(checkpoint("flux"), max_running=8, quantize=PER_TENSOR) as drive:
        solos = [alone(drive.engine.loaded.pipe, one) for one in wanted]
        heard = [drive.submit(**one) for one in wanted]
        drive.finish()

        assert drive.widest("transformer") == 1
    for one, solo in zip(heard, solos, strict=True):
        assert gap(drawn(one.outcome.fields), solo) <= 1e-5


# bitsandbytes: `make test-bitsandbytes`; it takes seconds to import, in every process

BITSANDBYTES = {"nf4": "Params4bit", "fp4": "Params4bit", "llm-int8": "Int8Params"}


@pytest.mark.bitsandbytes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", ["flux", "sdxl", "qwen_image", "wan21_t2v"])
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_requests_over_weights_of_bitsandbytes_get_what_they_get_alone(
    kind: str, family: str
) -> None:
    denoiser, wanted = "unet" if family == "sdxl" else "transformer", requests_of(family)
    with driving(checkpoint(family), max_running=8, quantize=kind) as drive:
        pipe = drive.engine.loaded.pipe
        assert BITSANDBYTES[kind] in weight_types(pipe.components[denoiser])
        solos = [alone(pipe, one) for one in wanted]
        heard = [drive.submit(**one) for one in wanted]
        drive.finish()
        widths = drive.widths(denoiser)

    most = 1e-5 if kind == "llm-int8" else 1e-3  # its kernels compute in bfloat16
    for one, solo in zip(heard, solos, strict=True):
        assert gap(drawn(one.outcome.fields), solo) <= most
    assert max(widths) == 1 if kind == "llm-int8" else mean(widths) > 1.4


@pytest.mark.bitsandbytes
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_text_encoders_and_single_files_take_bitsandbytes_too(kind: str, tuned: Path) -> None:
    settings = EngineSettings(
        device="cpu", component=(f"transformer={tuned}",), quantize=f"{kind},text_encoder_2={kind}"
    )

    loaded = load(checkpoint("flux"), settings)

    for name in ("transformer", "text_encoder_2"):
        assert BITSANDBYTES[kind] in weight_types(loaded.modules[name])
    assert bool(torch.isfinite(alone(loaded.pipe, requests_of("flux")[0])).all())


@pytest.mark.bitsandbytes
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_llm_int8_mixes_rows_only_where_it_looks_for_outliers(threshold: float) -> None:
    options = {"load_in_8bit": True, "llm_int8_threshold": threshold}
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32)).requires_grad_(False).eval()
    quantize_read(layer, Quantization("bitsandbytes_8bit", options), torch.float32)

    assert (mixes_rows(layer) is not None) == (threshold > 0)


@pytest.mark.parametrize("method", [*READ_METHODS, "gptq"])
def test_weights_quantized_already_that_cannot_be_read_say_how_and_what_works(
    method: str, tmp_path: Path
) -> None:
    copytree(checkpoint("flux"), folder := tmp_path / "model")
    file = folder / "transformer" / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(config))
    package, condition = READ_METHODS.get(method, ("", "what diffusers does not have"))

    note = quantized_components(folder)
    assert all(text in note for text in (package, condition))
    if method not in ("quanto", "torchao"):  # these are read here
        with pytest.raises(
            LoadFailed, match=f"quantized by {method}, which .*: else take its plain"
        ):
            load(str(folder), EngineSettings(device="cpu"))
