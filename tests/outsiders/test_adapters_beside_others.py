"""Adapters beside others, and on models that are not as they were trained for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig
from safetensors.torch import load_file
from torch import Tensor

import carpool
from carpool.errors import InvalidValue, LoraRejected
from carpool.request.parameters import check
from carpool.types import Request
from support.engine_driver import CLOSE, Recorder, driving, fresh, gap
from support.lora_files import dora, weights, write
from support.lora_pictures import by_carpool, pictures
from support.prepared import gguf_of
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
CLEAR = 100 * CLOSE  # the least that an adapter must change a pixel


def flux() -> dict[str, Tensor]:
    return weights("flux", 3)


def test_a_folder_that_peft_wrote_has_the_scaling_of_its_config(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    pipe: Any = fresh("flux")
    layers = ["to_q", "to_k"]
    config = LoraConfig(r=4, lora_alpha=10, target_modules=layers, init_lora_weights=False)
    torch.manual_seed(3)
    get_peft_model(pipe.transformer, config).save_pretrained(str(tmp_path / "style"))
    pipe = fresh("flux")
    pipe.transformer = PeftModel.from_pretrained(pipe.transformer, tmp_path / "style").model
    settings = tmp_path / "style" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"of_a_later_version": 1}))

    with driving("flux", lora=(f"peft={tmp_path / 'style'}",)) as drive:
        picture, _ = by_carpool(drive, [{"id": "peft"}], "flux")
        file = tmp_path / "style" / "adapter_model.safetensors"
        biased = load_file(file) | {"base_model.model.x_embedder.base_layer.bias": torch.ones(32)}
        write(file, biased)
        for name, value in {"bias": "lora_only", "init_lora_weights": "pissa"}.items():
            settings.write_text(json.dumps(json.loads(settings.read_text()) | {name: value}))
            with pytest.raises(LoraRejected, match=f"{name}='{value}', which changes the model"):
                drive.engine.add_lora(name, tmp_path / "style")
            settings.write_text(json.dumps(json.loads(settings.read_text()) | {name: "none"}))

    assert gap(picture, pictures(pipe, "flux")) < CLOSE


def test_a_file_that_a_denoiser_saved_has_the_scaling_of_its_header(tmp_path: Path) -> None:
    from peft import LoraConfig

    pipe: Any = fresh("flux")
    config = LoraConfig(target_modules=["to_q"], init_lora_weights=False, use_rslora=True)
    torch.manual_seed(3)
    pipe.transformer.add_adapter(config)
    pipe.transformer.save_lora_adapter(tmp_path / "saved", adapter_name="default")

    with driving("flux", lora=(f"saved={tmp_path / 'saved'}",)) as drive:
        picture, _ = by_carpool(drive, [{"id": "saved"}], "flux")

    assert gap(picture, pictures(pipe, "flux")) < CLOSE


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_an_adapter_is_beside_one_that_was_loaded_before(kind: str, tmp_path: Path) -> None:
    first = write(tmp_path / "first.safetensors", flux())
    state = {n: w for n, w in weights("flux", 4, std=0.1).items() if "to_q" in n}
    second = write(
        tmp_path / "second.safetensors",
        state if kind == "LoRA" else dora(state, "flux", "transformer"),
    )
    pipe, judge = fresh("flux"), fresh("flux")
    for one in (pipe, judge):
        one.load_lora_weights(str(first.parent), weight_name=first.name, adapter_name="first")
    pictures(pipe, "flux")
    judge.load_lora_weights(str(tmp_path), weight_name=second.name, adapter_name="second")

    with driving(pipe) as drive:
        drive.engine.add_lora("second", second)
        both, _ = by_carpool(drive, [{"id": "second", "scale": 0.6}], "flux")
        alone, _ = by_carpool(drive, None, "flux")

    judge.set_adapters(["first", "second"], [1.0, 0.6])
    assert gap(both, pictures(judge, "flux")) < CLOSE
    judge.set_adapters(["first"], [1.0])
    assert gap(alone, pictures(judge, "flux")) < CLOSE
    assert gap(alone, both) > CLEAR


def test_two_doras_are_applied_in_the_order_of_the_request(tmp_path: Path) -> None:
    files = {
        name: write(
            tmp_path / f"{name}.safetensors",
            dora(weights("flux", seed, std=0.1), "flux", "transformer"),
        )
        for seed, name in enumerate(("a", "b"))
    }
    judge: Any = fresh("flux")
    for name, file in files.items():
        judge.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name=name)
    orders = [["a", "b"], ["b", "a"]]

    with driving("flux", lora=tuple(f"{name}={file}" for name, file in files.items())) as drive:
        requests = [
            drive.submit("a cat", lora=[{"id": name} for name in order], **ARGUMENTS["flux"])
            for order in orders
        ]
        drive.finish()

    alone = []
    for request, order in zip(requests, orders, strict=True):
        judge.set_adapters(order, [1.0, 1.0])
        alone.append(pictures(judge, "flux"))
        assert gap(request.image, alone[-1]) < CLOSE
    assert gap(*alone) > CLEAR


@pytest.mark.parametrize(
    ("dtype", "own"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_adapters_go_beside_gguf_layers(
    dtype: torch.dtype, own: torch.dtype, tmp_path: Path
) -> None:
    """In the type in which those compute, whatever that of the adapter's file is."""
    [file] = (checkpoint("flux") / "transformer").glob("*.safetensors")
    denoiser = gguf_of(load_file(file), tmp_path / "denoiser.gguf")
    lora = write(tmp_path / "lora.safetensors", {n: w.to(own) for n, w in flux().items()})
    judge: Any = fresh("flux").to(dtype)
    judge.transformer = FluxTransformer2DModel.from_single_file(
        str(denoiser), config=str(checkpoint("flux")), subfolder="transformer",
        quantization_config=GGUFQuantizationConfig(compute_dtype=dtype), torch_dtype=dtype,
    )  # fmt: skip
    judge.load_lora_weights(str(tmp_path), weight_name=lora.name, adapter_name="x")
    component = (f"transformer={denoiser}",)

    with carpool.load(checkpoint("flux"), component=component, dtype=str(dtype)[6:]) as engine:
        engine.add_lora("x", lora)
        magnitudes = write(tmp_path / "dora.safetensors", dora(flux(), "flux", "transformer"))
        with pytest.raises(LoraRejected, match="those are quantized: load the model unquantized"):
            engine.add_lora("dora", magnitudes)
        [output] = engine.generate("a cat", seed=0, lora=[{"id": "x"}], **ARGUMENTS["flux"])

    assert gap(output.images, pictures(judge, "flux")) < CLOSE


def test_each_module_may_have_a_scale_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "x.safetensors", weights("sdxl", 3, std=0.1))
    scales = {"unet": 1.0, "text_encoder": 0.0, "text_encoder_2": -0.5}
    lora = [{"id": "x", "target": module, "scale": scale} for module, scale in scales.items()]

    with driving("sdxl", lora=(f"x={file}",)) as drive:
        picture, _ = by_carpool(drive, lora, "sdxl")
        whole, _ = by_carpool(drive, [{"id": "x", "target": "all"}], "sdxl")

    judge: Any = fresh("sdxl")
    judge.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="x")
    judge.set_adapters(["x"], [dict(scales)])
    assert gap(picture, pictures(judge, "sdxl")) < CLOSE
    judge.set_adapters(["x"], [1.0])
    assert gap(whole, pictures(judge, "sdxl")) < CLOSE
    assert gap(picture, whole) > CLEAR


def test_a_request_whose_adapter_a_worker_has_not_is_refused_there() -> None:
    """As a job that outlived its adapter: it was drawn without, and nothing said so."""
    with driving("flux") as drive:
        card = replace(drive.engine.loaded.card, lora=("ghost",))
        request = check(card, Request("a cat", lora=[{"id": "ghost"}], **ARGUMENTS["flux"]))

        with pytest.raises(InvalidValue, match="'ghost': the worker has no adapter of this name"):
            drive.engine.submit(request, Recorder())
