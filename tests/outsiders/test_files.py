"""Files of weights as people have them: read whole and drawn as they mean, or refused by name."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.errors import LoadFailed, SettingRejected
from support import original_names
from support.engine_driver import fresh, gap, plain
from support.newcomers import two_adapters, two_controls
from support.prepared import alone, gguf_of, own_weights, requests_of
from support.tiny import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CLOSE = 1e-5

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def weights(family: str, component: str) -> dict[str, Tensor]:
    return own_weights(getattr(plain(family), component))


def served(family: str, **settings: Any) -> Any:
    """A family's pipeline with some components from elsewhere."""
    component = tuple(f"{name}={where}" for name, where in settings.pop("parts", {}).items())
    return load(
        settings.pop("model", checkpoint(family)),
        EngineSettings(device="cpu", component=component, **settings),
    ).pipe


def refused(family: str, component: str, where: Path) -> str:
    with pytest.raises((LoadFailed, SettingRejected)) as failed:
        served(family, parts={component: where})
    message = str(failed.value)
    assert "\n" not in message
    return message


def of_a_variant(folder: Path) -> None:
    fresh("sd15").save_pretrained(folder, variant="fp16", max_shard_size="40KB")


def with_index(folder: Path, **entries: Any) -> None:
    shutil.copytree(checkpoint("sd15"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, **entries}))


def with_code(folder: Path) -> None:
    with_index(folder, _class_name=["own", "Own"])
    (folder / "own.py").write_text("raise SystemExit")


def without(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with_index(folder)
        for name in names:
            (folder / name).rename(folder / "gone")

    return make


NO_VOCABULARY = r"tokenizer has no vocabulary: .* \(merges.txt or tokenizer.json or vocab.json\)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_a_variant, "of a variant: say --variant fp16"),
        (with_code, "never runs: --pipeline takes a function"),
        (without("tokenizer"), NO_VOCABULARY),  # transformers makes an empty one
        (without("tokenizer/tokenizer.json"), NO_VOCABULARY),
        (without("vae"), "vae is missing, which model_index.json names: download or copy it again"),
        (without("unet/config.json"), "unet/config.json is missing: download or copy it again"),
        (without("text_encoder/config.json"), "text_encoder/config.json is missing"),
        (
            lambda folder: with_index(folder, _class_name="NewPipeline"),
            "NewPipeline .* another ver",
        ),
        (
            lambda folder: with_index(folder, unet=["diffusers", "FluxTransformer2DModel"]),
            "unet/config.json is of UNet2DConditionModel, and model_index.json names FluxTransf",
        ),
    ],
)
def test_a_folder_that_diffusers_cannot_open_as_it_is_is_refused_with_what_works(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "model")

    with pytest.raises(LoadFailed, match=message):
        served("sd15", model=tmp_path / "model")


def scaled(state: Mapping[str, Tensor], *, by: str = "tensor", names: str = "scale_weight") -> Any:
    """Matrices as float8 with scales beside them, and the weights that they stand for."""
    file, true = {}, {}
    for name, weight in state.items():
        if weight.ndim != 2 or not name.endswith(".weight") or "embed" in name:
            file[name] = true[name] = weight
            continue
        most = weight.abs().amax(1, keepdim=True) if by == "channel" else weight.abs().amax()
        scale = most / 448
        file[name] = (weight / scale).to(torch.float8_e4m3fn)
        file[name.removesuffix("weight") + names] = scale.float().contiguous()
        true[name] = file[name].float() * scale
    return file, true


def assert_holds(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    held = module.state_dict()
    for name, weight in state.items():
        torch.testing.assert_close(held[name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("by", ["tensor", "channel"])
@pytest.mark.parametrize("names", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize(
    ("family", "component"), [("flux", "text_encoder_2"), ("wan21_t2v", "transformer")]
)
def test_scaled_float8_weights_are_multiplied_by_their_scales(
    family: str, component: str, by: str, names: str, tmp_path: Path
) -> None:
    state, true = scaled(weights(family, component), by=by, names=names)
    state["scaled_fp8"] = torch.tensor([], dtype=torch.float8_e4m3fn)
    some = next(name for name in state if name.endswith(names))
    state[some.replace(names, "scale_input" if "scale_w" in names else "input_scale")] = torch.ones(
        ()
    )
    save_file(state, tmp_path / "fp8.safetensors")

    module = getattr(served(family, parts={component: tmp_path / "fp8.safetensors"}), component)

    assert_holds(module, true)


def test_scaled_float8_weights_by_original_names_draw_the_picture_that_they_stand_for(
    tmp_path: Path,
) -> None:
    pipe = fresh("sdxl")
    state, true = scaled(original_names.unet(pipe.unet))
    state["model.diffusion_model.scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(state, tmp_path / "fp8.safetensors")
    save_file(true, tmp_path / "true.safetensors")
    pipe.unet = type(pipe.unet).from_single_file(
        str(tmp_path / "true.safetensors"), config=str(checkpoint("sdxl")), subfolder="unet"
    )
    request = requests_of("sdxl")[0]

    own = served("sdxl", parts={"unet": tmp_path / "fp8.safetensors"})

    with torch.no_grad():
        assert gap(alone(own, request), alone(pipe, request)) <= CLOSE


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_wan_by_its_original_names_is_read_with_its_scales_and_a_layer_more_is_named(
    prefix: str, tmp_path: Path
) -> None:
    own = fresh("wan21_t2v").transformer
    state, true = scaled(original_names.wan(own))
    own.load_state_dict(dict(zip(own_weights(own), true.values(), strict=True)))
    state["scaled_fp8"] = torch.tensor([], dtype=torch.float8_e4m3fn)
    more = last_layer(state, "blocks.")
    for name, entries in {"wan": state, "more": more}.items():
        wrapped = {f"{prefix}{key}": weight for key, weight in entries.items()}
        save_file(wrapped, tmp_path / f"{name}.safetensors")

    pipe = served("wan21_t2v", parts={"transformer": tmp_path / "wan.safetensors"})

    assert_holds(pipe.transformer, own.state_dict())
    message = refused("wan21_t2v", "transformer", tmp_path / "more.safetensors")
    assert "it has blocks.2.cross_attn.k.bias and" in message


def test_a_scale_of_blocks_is_spread_over_them(tmp_path: Path) -> None:
    state = weights("flux", "transformer")
    name = "context_embedder.weight"
    rows, columns = state[name].shape
    scale = torch.rand(rows // 2, columns // 4) + 0.5
    true = scale.repeat_interleave(2, 0).repeat_interleave(4, 1) * state[name]
    save_file(
        {**state, name.replace("weight", "weight_scale"): scale}, tmp_path / "block.safetensors"
    )

    module = served("flux", parts={"transformer": tmp_path / "block.safetensors"}).transformer

    assert_holds(module, {name: true})


def comfy(kind: str) -> Tensor:
    return torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)


def header(**formats: Any) -> dict[str, str]:
    """What a file says of the format of two layers."""
    layers = dict.fromkeys(("x_embedder", "context_embedder"), formats)
    return {"_quantization_metadata": json.dumps({"layers": layers})}


def test_a_format_of_layers_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    state, file = weights("flux", "transformer"), tmp_path / "a.safetensors"
    scale = "x_embedder.weight_scale"
    for more, head, told in (
        ({"x_embedder.comfy_quant": comfy("nvfp4")}, {}, "x_embedder are quantized as nvfp4"),
        ({}, header(format="mxfp8"), "x_embedder are quantized as mxfp8"),
        (
            {},
            header(format="float8_e4m3fn", convrot=True),
            "quantized as float8_e4m3fn with convrot",
        ),
        ({scale: torch.ones(3)}, {}, f"{scale} is (3,)"),
        ({scale: torch.tensor(torch.nan)}, {}, f"{scale} is not finite"),
        ({scale: torch.tensor(torch.inf)}, {}, f"{scale} is not finite"),
    ):
        save_file({**state, **more}, file, metadata=head or None)
        assert told in refused("flux", "transformer", file)


@pytest.mark.parametrize(
    "head",
    [{}, header(format="float8_e4m3fn"), header(format="float8_e4m3fn_rowwise"),
     header(format="float8_e4m3fn", full_precision_matrix_mult=True, convrot=False),
     header(format="float8_e4m3fn_blockwise", group_size=1)],
)  # fmt: skip
def test_float8_layers_that_a_header_or_an_entry_names_are_read(
    head: dict[str, str], tmp_path: Path
) -> None:
    by = "channel" if head else "tensor"
    state, true = scaled(weights("flux", "transformer"), by=by, names="weight_scale")
    if not head:
        state["x_embedder.comfy_quant"] = comfy("float8_e4m3fn")
    save_file(state, tmp_path / "a.safetensors", metadata=head or None)

    pipe = served("flux", parts={"transformer": tmp_path / "a.safetensors"})

    assert_holds(pipe.transformer, true)


def last_layer(state: dict[str, Tensor], prefix: str, plus: int = 1) -> dict[str, Tensor]:
    """Weights with one layer more."""
    numbers = {int(n[len(prefix) :].split(".")[0]) for n in state if n.startswith(prefix)}
    last, more = max(numbers), max(numbers) + plus
    extra = {
        n.replace(f"{prefix}{last}.", f"{prefix}{more}.", 1): w.clone()
        for n, w in state.items()
        if n.startswith(f"{prefix}{last}.")
    }
    return {**state, **extra}


@pytest.mark.parametrize(
    ("family", "component", "prefix", "named"),
    [
        ("flux", "transformer", "single_transformer_blocks.", "single_transformer_blocks.2."),
        ("wan22_t2v_a14b", "transformer_2", "blocks.", "blocks.2."),
        ("flux", "text_encoder_2", "encoder.block.", "encoder.block."),
        ("sdxl", "text_encoder", "encoder.layers.", "encoder.layers."),
    ],
)
def test_a_file_with_one_layer_more_is_refused_by_name(
    family: str, component: str, prefix: str, named: str, tmp_path: Path
) -> None:
    save_file(last_layer(weights(family, component), prefix), tmp_path / "more.safetensors")

    message = refused(family, component, tmp_path / "more.safetensors")

    assert f"{component}={tmp_path}/more.safetensors cannot be read: it has {named}" in message
    assert "has no place for" in message


def test_a_layer_more_by_original_names_is_told_by_the_names_of_the_file(tmp_path: Path) -> None:
    unet = plain("sdxl").unet
    state = original_names.unet(unet)
    extra = {"model.diffusion_model.output_blocks.17.0.in_layers.0.weight": torch.zeros(4)}
    save_file({**state, **extra}, tmp_path / "more.safetensors")
    lacking = {n: w for n, w in state.items() if "middle_block.1" not in n}
    save_file(lacking, tmp_path / "less.safetensors")

    more = refused("sdxl", "unet", tmp_path / "more.safetensors")
    less = refused("sdxl", "unet", tmp_path / "less.safetensors")

    assert "it has output_blocks.17.0.in_layers.0.weight, which" in more
    assert "it lacks mid_block.attentions.0" in less


@pytest.mark.parametrize("component", ["transformer", "text_encoder_2", "vae"])
def test_a_folder_with_a_weight_too_few_or_too_many_is_refused_by_name(
    component: str, tmp_path: Path
) -> None:
    """Of the component alone, and of the whole model."""
    model = Path(shutil.copytree(checkpoint("flux"), tmp_path / "model"))
    [file] = (model / component).glob("*.safetensors")
    state = load_file(file)
    some = next(name for name in state if state[name].ndim == 2 and "embed" not in name)
    less = {name: weight for name, weight in state.items() if name != some}

    for told, entries in {
        "it has odd.weight, which": {**state, "odd.weight": torch.zeros(2)},
        f"it lacks {some}": less,
        f"weights of {some} are quantized as 8-bit": {**state, some: state[some].to(torch.int8)},
    }.items():
        save_file(entries, file, metadata={"format": "pt"})
        assert told in refused("flux", component, model / component)
        with pytest.raises(LoadFailed, match=rf"{component} of .*: {re.escape(told)}"):
            served("flux", model=model)

    given = served("flux", model=model, parts={component: checkpoint("flux")})
    assert_holds(getattr(given, component), weights("flux", component))


def test_an_encoder_that_lacks_weights_or_is_of_another_size_is_refused(tmp_path: Path) -> None:
    state = weights("flux", "text_encoder_2")
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    save_file({n: w for n, w in state.items() if n != name}, tmp_path / "less.safetensors")
    wide = {**state, name: torch.zeros(3, 3)}
    save_file(wide, tmp_path / "wide.safetensors")

    assert f"it lacks {name}" in refused("flux", "text_encoder_2", tmp_path / "less.safetensors")
    message = refused("flux", "text_encoder_2", tmp_path / "wide.safetensors")
    assert "T5EncoderModel of another size" in message
    assert f"{name} is (3, 3) and must be" in message


@pytest.mark.parametrize(
    ("family", "component", "change"),
    [
        ("flux", "text_encoder_2", lambda s: {**s, "decoder.final.weight": torch.zeros(1)}),
        ("flux", "text_encoder_2", lambda s: {**s, "lm_head.weight": torch.zeros(1)}),
        (
            "flux",
            "text_encoder_2",
            lambda s: (
                {f"t5.{n}": w for n, w in s.items()} | {"spiece_model": torch.zeros(9).byte()}
            ),
        ),
        (
            "sdxl",
            "text_encoder",
            lambda s: {
                **{f"text_model.{n}": w for n, w in s.items()},
                "text_model.embeddings.position_ids": torch.arange(7)[None],
                "logit_scale": torch.ones(()),
                "vision_model.x.weight": torch.zeros(1),
                "text_projection.weight": torch.zeros(1, 1),
            },
        ),
        ("zimage", "text_encoder", lambda s: {f"model.{n}": w for n, w in s.items()}),
        ("wan21_t2v", "text_encoder", lambda s: {**s, "spiece_model": torch.zeros(3).byte()}),
        ("sdxl", "unet", lambda s: {**s, "model_ema.decay": torch.zeros(())}),
    ],
)
def test_names_that_change_no_picture_may_stay(
    family: str, component: str, change: Change, tmp_path: Path
) -> None:
    state = {name: weight * 1.5 for name, weight in weights(family, component).items()}
    save_file(dict(change(state)), tmp_path / "a.safetensors")

    module = getattr(served(family, parts={component: tmp_path / "a.safetensors"}), component)

    assert_holds(module, state)


@pytest.mark.parametrize(
    ("prefix", "ending"),
    [
        ("_orig_mod.", "safetensors"), ("module.", "sft"), ("module._orig_mod.", "SAFETENSORS"),
        ("diffusion_model.", "safetensors"), ("model.diffusion_model.", "sft"),
        ("transformer.", "SAFETENSORS"),
    ],
)  # fmt: skip
def test_prefixes_of_wrappers_are_removed(prefix: str, ending: str, tmp_path: Path) -> None:
    state = {name: weight * 1.5 for name, weight in weights("wan21_t2v", "transformer").items()}
    file = tmp_path / f"wrapped.{ending}"
    wrapped = {f"{prefix}{name}": weight for name, weight in state.items()}
    if prefix == "_orig_mod.":  # blocks may be compiled one by one, too
        wrapped = {n.replace("blocks.0.", "blocks.0._orig_mod."): w for n, w in wrapped.items()}
    save_file(wrapped, file)

    given = served("wan21_t2v", parts={"transformer": file})
    model = served("wan21_t2v", model=file, model_config=str(checkpoint("wan21_t2v")))

    assert_holds(given.transformer, state)
    assert_holds(model.transformer, state)


def test_a_shard_stands_for_all_of_its_file_and_a_missing_one_is_named(tmp_path: Path) -> None:
    state = {name: weight * 1.5 for name, weight in weights("flux", "transformer").items()}
    names = sorted(state)
    files = [tmp_path / f"tuned-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, file in enumerate(files):
        save_file({name: state[name] for name in names[i::3]}, file)

    given = served("flux", parts={"transformer": files[1]})
    model = served("flux", model=files[0], model_config=str(checkpoint("flux")))
    assert_holds(given.transformer, state)
    assert_holds(model.transformer, state)
    files[1].unlink()
    for file in files:
        assert f"there is no such file: {files[1]}" in refused("flux", "transformer", file)
    with pytest.raises(LoadFailed, match=f"no such file: {files[1]}"):
        served("flux", model=files[0], model_config=str(checkpoint("flux")))


def test_a_folder_with_a_missing_shard_is_refused_in_one_line(tmp_path: Path) -> None:
    pipe = plain("flux")
    for name in ("transformer", "text_encoder_2"):
        getattr(pipe, name).save_pretrained(tmp_path / name, max_shard_size="20KB")
        sorted((tmp_path / name).glob("*-of-*.safetensors"))[1].unlink()

    for name in ("transformer", "text_encoder_2"):
        message = refused("flux", name, tmp_path / name)
        assert "-00002-of-" in message


def test_the_configuration_beside_a_file_of_a_folder_holds(tmp_path: Path) -> None:
    config = dict(plain("flux").transformer.config)
    from diffusers import FluxTransformer2DModel

    smaller = FluxTransformer2DModel.from_config({**config, "num_single_layers": 1})
    smaller.save_pretrained(tmp_path / "smaller")
    [file] = (tmp_path / "smaller").glob("*.safetensors")

    pipe = served("flux", parts={"transformer": file})

    assert_holds(pipe.transformer, smaller.state_dict())


def test_an_adapter_is_refused_as_a_model_and_as_a_component(tmp_path: Path) -> None:
    for name in ("transformer.x.lora_A.weight", "lora_unet_mid.lora_down.weight", "x.lokr_w1"):
        save_file({name: torch.zeros(4, 4)}, tmp_path / "style.safetensors")

        given = refused("flux", "transformer", tmp_path / "style.safetensors")
        with pytest.raises(LoadFailed) as failed:
            served("flux", model=tmp_path / "style.safetensors")

        for message in (given, str(failed.value)):
            assert f"it is an adapter (it has {name})" in message
            assert "--lora NAME=FILE" in message


def test_files_without_weights_or_quantized_by_other_libraries_are_refused(tmp_path: Path) -> None:
    state = weights("flux", "transformer")
    files: dict[str, tuple[dict[str, Tensor], str]] = {
        "empty": ({}, "it holds no weights"),
        "marks": ({"v_pred": torch.zeros(1)}, "it holds no weights"),
        "nf4": (
            {**state, "x_embedder.weight.quant_state.bitsandbytes__nf4": torch.zeros(2)},
            "x_embedder are quantized as quant_state.bitsandbytes__nf4",
        ),
        "svdq": ({**state, "x.qweight": torch.zeros(2)}, "weights of x are quantized as qweight"),
        "two": (
            {
                **state,
                "x_embedder.scale_weight": torch.ones(1),
                "x_embedder.weight_scale": torch.ones(1),
            },
            "has two scales",
        ),
        "integers": ({n: w.to(torch.int8) for n, w in state.items()}, "8-bit integers without"),
        "alone": ({**state, "x.weight_scale": torch.ones(1)}, "it has x.weight_scale, which"),
    }
    for name, (entries, told) in files.items():
        save_file(entries, tmp_path / f"{name}.safetensors")
        assert told in refused("flux", "transformer", tmp_path / f"{name}.safetensors"), name


def test_a_pickle_and_a_pipeline_without_the_component_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vae.pt").write_bytes(b"pickle")

    assert "may hold a pickle" in refused("flux", "vae", tmp_path / "vae.pt")
    message = refused("wan22_t2v_a14b", "transformer_2", checkpoint("wan21_t2v"))
    assert "it is a pipeline that has no transformer_2, but text_encoder, transformer" in message


@pytest.mark.parametrize(
    ("family", "name", "entry"),
    [("flux", "vae", "latent_channels"), ("sdxl_control", "controlnet", "cross_attention_dim")],
)
def test_a_component_of_another_width_is_refused(
    family: str, name: str, entry: str, tmp_path: Path
) -> None:
    own = getattr(plain(family), name)
    width = own.config[entry]
    type(own).from_config({**own.config, entry: 2 * width}).save_pretrained(tmp_path)
    [file] = tmp_path.glob("*.safetensors")

    for where in (tmp_path, file):
        assert f"its {entry} is {2 * width}, and {width} in this" in refused(family, name, where)


@pytest.mark.parametrize("name", ["controlnet", "adapter"])
def test_several_nets_are_read_from_a_folder_each(name: str, tmp_path: Path) -> None:
    pipe = {"controlnet": two_controls, "adapter": two_adapters}[name]()
    pipe.save_pretrained(tmp_path)

    served_pipe = served("", model=tmp_path)

    assert_holds(getattr(served_pipe, name), getattr(pipe, name).state_dict())
    with pytest.raises(LoadFailed, match=f"{name} is several models: replace their folders"):
        served("", model=tmp_path, parts={name: tmp_path / name})


def test_a_component_of_another_class_is_refused_by_name(tmp_path: Path) -> None:
    vae = checkpoint("wan21_t2v") / "vae"
    clip = checkpoint("flux") / "text_encoder"
    save_file(weights("sdxl", "unet"), tmp_path / "unet.safetensors")

    assert "it is a AutoencoderKLWan, and vae of this model is a AutoencoderKL" in refused(
        "flux", "vae", vae
    )
    assert "T5EncoderModel" in refused("flux", "text_encoder_2", clip)
    message = refused("flux", "transformer", tmp_path / "unet.safetensors")
    assert "its weights are not those of a FluxTransformer2DModel" in message


def test_a_component_that_the_pipeline_has_not_is_told_with_the_nearest(tmp_path: Path) -> None:
    for named, nearest in {"unet": "", "transformer2": "transformer", "vea": "vae"}.items():
        message = refused("flux", named, tmp_path / "a.safetensors")
        assert f"no component {named!r}" in message
        assert nearest in message


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_is_cut_or_not_the_file_itself_is_refused(kind: str, tmp_path: Path) -> None:
    file, state = tmp_path / f"model.{kind}", weights("flux", "transformer")
    save_file(state, file) if kind == "safetensors" else gguf_of(state, file)
    whole = file.read_bytes()
    wrong = {b"version https://git-lfs.github.com/spec/v1\noid": "git lfs pull"}
    wrong |= {b"<!DOCTYPE html><p>Log in": "is a web page", b"": "is empty"}
    for content, why in {**{whole[:cut]: "" for cut in (4, 40, 2000, -8)}, **wrong}.items():
        file.write_bytes(content)
        with pytest.raises(LoadFailed, match=f"cannot be read: .*{why}"):
            served("flux", model=file, model_config=str(checkpoint("flux")))
        assert re.search(f"cannot be read: .*{why}", refused("flux", "transformer", file))


def test_numbers_of_gguf_that_are_no_matrix_are_read_or_refused_by_name(tmp_path: Path) -> None:
    state = weights("flux", "transformer")
    gguf_of(state, tmp_path / "a.gguf", plain="BF16")
    bias = {n: w for n, w in state.items() if n.endswith(".bias") and len(w) % 32 == 0}
    gguf_of(bias, tmp_path / "b.gguf", plain="Q8_0")

    pipe = served("flux", parts={"transformer": tmp_path / "a.gguf"})

    assert_holds(pipe.transformer, {name: w.bfloat16().float() for name, w in bias.items()})
    assert "has 1 axes, and quantized" in refused("flux", "transformer", tmp_path / "b.gguf")


def test_gguf_of_another_model_is_refused(tmp_path: Path) -> None:
    gguf_of(weights("wan21_t2v", "transformer"), tmp_path / "wan.gguf")

    message = refused("flux", "transformer", tmp_path / "wan.gguf")

    assert "its weights are not those of a FluxTransformer2DModel" in message
    gguf_of(last_layer(weights("flux", "transformer"), "transformer_blocks."), tmp_path / "m.gguf")
    assert "has no place for" in refused("flux", "transformer", tmp_path / "m.gguf")
