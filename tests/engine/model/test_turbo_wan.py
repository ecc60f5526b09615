"""TurboWan: pickles under TurboDiffusion's names, int8 layers, its sampler, two experts."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from carpool.config import EngineSettings
from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.load import load
from carpool.engine.model.sparse_wan import SparseLinearWanTransformer
from carpool.engine.model.turbo_wan import as_wan, base_of, levels
from carpool.errors import LoadFailed
from carpool.models.published import PUBLISHED, in_parts, name_of
from carpool.preflight import check
from support import original_names
from support.engine_driver import driving, gap
from support.matrix.sparse import GRID, turbo_wan
from support.matrix.wan import IMAGES
from support.prepared import own_weights
from support.tiny import ARGUMENTS, checkpoint

SMALL, EXPERTS = (
    f"TurboDiffusion/TurboWan2.{kind}" for kind in ("1-T2V-1.3B-480P", "2-I2V-A14B-720P")
)
SIZE = {name: GRID[name] for name in ("height", "width")}


def named(model: Any) -> dict[str, Tensor]:
    """A denoiser's weights as TurboDiffusion's files have them."""
    weights = original_names.wan(model)
    for name in [name for name in weights if ".proj_l." in name]:
        weights[name.replace(".proj_l.", ".attn_op.local_attn.proj_l.")] = weights.pop(name)
    weights["patch_embedding.weight"] = weights["patch_embedding.weight"].flatten(1)
    return weights


def quantized(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights with int8 linear layers in their blocks; and the weights that those stand for."""
    files, true = dict(weights), dict(weights)
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and weight.ndim == 2 and name.startswith("blocks.")
        if is_linear and "proj_l" not in name:
            scale = weight.abs().max() / 127
            files[f"{layer}.int8_weight"] = (files.pop(name) / scale).round().to(torch.int8)
            files[f"{layer}.scale"] = scale.reshape(1, 1)
            true[name] = files[f"{layer}.int8_weight"] * scale
    return files, true


@pytest.fixture(scope="module")
def small() -> DiffusionPipeline:
    pipe = turbo_wan(DiffusionPipeline.from_pretrained(checkpoint("wan21_t2v")))
    for block in pipe.transformer.blocks:
        block.attn1.processor.share = 0.1
    return pipe


@pytest.fixture(scope="module")
def folder(small: DiffusionPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as it is downloaded."""
    place = tmp_path_factory.mktemp("turbo") / "TurboWan2.1-T2V-1.3B-480P"
    place.mkdir()
    torch.save(named(small.transformer), place / f"{place.name}.pth")
    torch.save(quantized(named(small.transformer))[0], place / f"{place.name}-quant.pth")
    return place


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(device="cpu", model_config=str(checkpoint("wan21_t2v")), **more)


def alone(pipe: DiffusionPipeline, seed: int, **arguments: Any) -> Tensor:
    """Plain diffusers, with these transformers and this scheduler."""
    pipe.set_progress_bar_config(disable=True)
    generator = pipe.scheduler.generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        frames = pipe(**{**arguments, **GRID}, generator=generator).frames
    assert isinstance(frames, Tensor)
    return frames


def test_the_levels_are_the_angles_of_the_published_sampler() -> None:
    four = levels(80.0)

    assert four[0] == pytest.approx(1000 * 80 / 81)
    assert four[1:] == pytest.approx(
        [1000 * math.tan(x) / (1 + math.tan(x)) for x in (1.5, 1.4, 1)]
    )
    scheduler = DMDScheduler(four, rounds_timesteps=True)
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [988.0, 932.0, 852.0, 608.0]  # as bfloat16 has them
    assert scheduler.sigmas[:4].tolist() == pytest.approx([x / 1000 for x in four])
    assert scheduler.init_noise_sigma == pytest.approx(80 / 81)


def test_the_first_sample_has_the_samplers_share_of_noise(small: DiffusionPipeline) -> None:
    shape = 1, 16, 32, 48, 5, torch.float32, torch.device("cpu")
    noise = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(5))

    own = small.prepare_latents(*shape, torch.Generator().manual_seed(5))
    given = small.prepare_latents(*shape, None, noise)

    torch.testing.assert_close(own, noise * 80 / 81)
    torch.testing.assert_close(given, own)


def test_a_downloaded_repository_is_served_and_gives_what_plain_diffusers_gives(
    folder: Path, small: DiffusionPipeline
) -> None:
    given = {n: v for n, v in ARGUMENTS["wan21_t2v"].items() if n != "num_inference_steps"} | SIZE
    check(str(folder), settings())

    config = str(checkpoint("wan21_t2v"))
    with driving(folder, model_config=config, numerics="exact") as drive:
        heard = [drive.submit("a cat", seed=1, **given), drive.submit("a cat", seed=2, **given)]
        drive.finish()

    card = drive.engine.loaded.card
    assert (card.id, card.defaults["num_inference_steps"]) == (name_of(str(folder)), 4)
    for recorder, seed in zip(heard, (1, 2), strict=True):
        arguments = ARGUMENTS["wan21_t2v"] | {"prompt": "a cat", "num_inference_steps": 4}
        expected = alone(small, seed, **arguments)
        assert torch.equal(recorder.outcome.fields["frames"], expected)
    assert drive.widest("transformer") == 2


def test_one_file_is_a_model_or_a_component_and_int8_layers_are_plain_weights(
    folder: Path, small: DiffusionPipeline
) -> None:
    plain, quant = folder / f"{folder.name}.pth", folder / f"{folder.name}-quant.pth"
    base = checkpoint("wan21_t2v")
    weights = original_names.wan(small.transformer)
    true = dict(zip(own_weights(small.transformer), quantized(weights)[1].values(), strict=True))

    whole = load(plain, settings())
    part = load(base, EngineSettings(device="cpu", component=(f"transformer={quant}",)))
    variant = load(folder, settings(variant="quant"))

    for loaded in (whole, part, variant):
        assert isinstance(loaded.pipe.transformer, SparseLinearWanTransformer)
        assert isinstance(loaded.pipe.scheduler, DMDScheduler)
        assert type(loaded.pipe) is type(small)
    for loaded, expected in (
        (whole, own_weights(small.transformer)),
        (part, true),
        (variant, true),
    ):
        own = loaded.pipe.transformer.state_dict()
        for name, weight in expected.items():
            torch.testing.assert_close(own[name], weight, msg=name)


def test_two_experts_are_told_by_their_names_and_both_draw(tmp_path: Path) -> None:
    base = checkpoint("wan22_i2v_a14b")
    pipe = turbo_wan(DiffusionPipeline.from_pretrained(base))
    place = tmp_path / "TurboWan2.2-I2V-A14B-720P"
    place.mkdir()
    for component, stem in PUBLISHED[EXPERTS].files.items():
        module = getattr(pipe, component)
        torch.save(named(module), place / f"{stem}.pth")
        for block in module.blocks:
            block.attn1.processor.share = 0.1
    given = {n: v for n, v in ARGUMENTS["wan22_i2v_a14b"].items() if n != "num_inference_steps"}

    with driving(place, model_config=str(base)) as drive:
        heard = drive.submit("a cat", seed=1, image=IMAGES[0], **{**given, **SIZE})
        drive.finish()

    arguments = given | {"prompt": "a cat", "image": IMAGES[0], "num_inference_steps": 4}
    assert gap(heard.outcome.fields["frames"], alone(pipe, 1, **arguments)) <= 1e-4
    assert drive.widths("transformer") == drive.widths("transformer_2") == [1, 1]
    assert pipe.scheduler.init_noise_sigma == pytest.approx(200 / 201)
    (place / "TurboWan2.2-I2V-A14B-low-720P.pth").unlink()
    with pytest.raises(LoadFailed, match=r"has no TurboWan2.2-I2V-A14B-low-720P.pth, which is its"):
        load(place, EngineSettings(device="cpu", model_config=str(base)))


def test_an_id_of_the_hub_is_the_pipeline_that_its_card_names_with_its_files() -> None:
    base, small = in_parts(SMALL, EngineSettings())
    other, experts = in_parts(EXPERTS, EngineSettings(variant="quant", model_config="./wan"))

    assert (base, other) == ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "./wan")
    assert small.component == (f"transformer={SMALL}/TurboWan2.1-T2V-1.3B-480P.pth",)
    stem = f"{EXPERTS}/TurboWan2.2-I2V-A14B"
    assert experts.component == (
        f"transformer={stem}-high-720P-quant.pth", f"transformer_2={stem}-low-720P-quant.pth"
    )  # fmt: skip
    assert (experts.variant, experts.model_config, name_of(SMALL)) == (None, None, SMALL)
    with pytest.raises(LoadFailed, match=r"variant='fp16': .* has quant, or none"):
        in_parts(SMALL, EngineSettings(variant="fp16"))
    for model in ("shapes", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", str(checkpoint("wan21_t2v"))):
        assert in_parts(model, EngineSettings()) == (model, EngineSettings())
        assert name_of(model) is None


@pytest.mark.parametrize(
    ("width", "channels", "base"),
    [
        (1536, 16, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        (5120, 16, "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        (5120, 36, "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        (24, 16, None),
    ],
)
def test_a_file_tells_by_its_shapes_what_it_was_made_of(
    width: int, channels: int, base: str | None
) -> None:
    projection = "blocks.0.self_attn.attn_op.local_attn.proj_l.weight"
    weights = {"patch_embedding.weight": torch.empty(width, channels * 4, device="meta")}

    assert base_of(as_wan({projection: torch.empty(2, 2), **weights})) == base
    assert base_of(weights) is None


def test_scales_of_int8_layers_are_of_blocks_and_the_last_ones_are_short() -> None:
    weight = torch.full((130, 300), 2, dtype=torch.int8)
    scale = torch.arange(6.0).reshape(2, 3)

    [(name, plain)] = as_wan({"a.int8_weight": weight, "a.scale": scale}).items()

    assert (name, plain.shape) == ("a.weight", weight.shape)
    assert plain[0, [0, 127, 128, 255, 256, 299]].tolist() == [0, 0, 2, 2, 4, 4]
    assert plain[[127, 128, 129], 0].tolist() == [0, 6, 6]
    for wrong in ({}, {"a.scale": torch.ones(1, 1)}):
        with pytest.raises(ValueError, match=r"a.scale is .* must be \(2, 3\)"):
            as_wan({"a.int8_weight": weight, **wrong})


class Runs:
    """An object whose unpickling would run a function."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("this must not be printed",)


def test_a_pickle_of_anything_but_tensors_is_refused_and_runs_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.load(folder / f"{folder.name}.pth", weights_only=True)
    contents = {
        "runs": {**weights, "more": Runs()},
        "lists": {**weights, "steps": [1, 2]},
        "one": torch.zeros(3),
        "cut": None,
    }
    for name, content in contents.items():
        file = tmp_path / f"{name}.pth"
        torch.save(content, file)
        if content is None:
            file.write_bytes((folder / f"{folder.name}.pth").read_bytes()[:5000])
        for model, more in (
            (file, {}),
            (checkpoint("wan21_t2v"), {"component": f"transformer={file}"}),
        ):
            own = EngineSettings(device="cpu", component=tuple(more.values()))
            with pytest.raises(LoadFailed, match=r"take a \.safetensors"):
                load(model, own if more else settings())
    assert "must not be printed" not in capsys.readouterr().out


def test_weights_inside_of_a_state_of_training_are_read(folder: Path, tmp_path: Path) -> None:
    weights = torch.load(folder / f"{folder.name}.pth", weights_only=True)
    torch.save({"state_dict": {f"net.{k}": v for k, v in weights.items()}, "step": 7},
               tmp_path / "training.pth")  # fmt: skip
    shutil.copy(folder / f"{folder.name}.pth", tmp_path / "OTHER.PTH")

    for name in ("training.pth", "OTHER.PTH"):
        loaded = load(tmp_path / name, settings())
        assert isinstance(loaded.pipe.transformer, SparseLinearWanTransformer)
