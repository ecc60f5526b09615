"""Adapters of any kind are drawn as plain diffusers draws them; what is left out is reported."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from carpool.errors import LoraRejected
from support.engine_driver import CLOSE, Drive, driving, gap, plain
from support.lora_files import comfy, dora, kohya, lokr, weights, write
from support.lora_pictures import SCALE, by_carpool, by_diffusers, pictures

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",  # diffusers' Euler with numpy 2
    "ignore:Already found a `peft_config`:UserWarning",
)
State = dict[str, Tensor]
ATTENTION = "transformer.transformer_blocks.0.attn"
TEXT = "encoder_block_0_layer_0_SelfAttention_q"
KOHYA = ("lora_down", "lora_up")
CLEAR = 100 * CLOSE  # the least that an adapter must change a pixel


def flux() -> State:
    return weights("flux", 3)


def wan() -> State:
    return comfy(weights("wan21_t2v", 3, std=0.15))


def sdxl() -> State:
    return weights("sdxl", 3, std=0.1)


def as_type(dtype: torch.dtype) -> State:
    return {name: weight.to(dtype) for name, weight in flux().items()}


def pair(path: str, takes: int, gives: int, names: tuple[str, str] = ("lora_A", "lora_B")) -> State:
    down, up = names
    shapes = {down: (4, takes), up: (gives, 4)}
    return {f"{path}.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}


def mixed_ranks() -> State:
    return {
        name: (weight[:2] if "lora_A" in name else weight[:, :2].clone())
        if "to_k" in name
        else weight
        for name, weight in flux().items()
    }


def kohya_flux() -> State:
    """Of the double blocks, in the names of kohya."""
    layers = {"attn_qkv": (32, 96), "attn_proj": (32, 32), "mlp_0": (32, 128), "mlp_2": (128, 32)}
    return {
        name: weight * 0.3
        for block in range(2)
        for side in ("img", "txt")
        for layer, (takes, gives) in layers.items()
        for name, weight in pair(
            f"lora_unet_double_blocks_{block}_{side}_{layer}", takes, gives, KOHYA
        ).items()
    }


def image_attention() -> State:
    paths = [f"diffusion_model.blocks.{i}.cross_attn.{x}_img" for i in (0, 1) for x in "kv"]
    return wan() | {name: w for path in paths for name, w in pair(path, 24, 24).items()}


def joined_lokr() -> State:
    """In the names of the model's authors, whose layers are query, key and value in one."""
    model: Any = plain("flux2").transformer
    size, made = model.transformer_blocks[0].attn.to_q.in_features, State()
    chance = torch.Generator().manual_seed(6)
    for i in range(len(model.transformer_blocks)):
        for joined in ("img_attn", "txt_attn"):
            path = f"diffusion_model.double_blocks.{i}.{joined}.qkv"
            made[f"{path}.lokr_w1"] = torch.randn(2, 2, generator=chance) * 0.3
            second = torch.randn(3 * size // 2, size // 2, generator=chance)
            made[f"{path}.lokr_w2"] = second * 0.3
    return made


EQUAL: dict[str, tuple[str, Callable[[], State], str]] = {  # and what the warning names
    "a rank for each layer": ("flux", mixed_ranks, ""),
    "DoRA with convolutions": ("sdxl", lambda: dora(sdxl(), "sdxl", "unet"), ""),
    "DoRA of a text encoder": (
        "sdxl", lambda: dora(sdxl(), "sdxl", "text_encoder_2"), "only the LoRA part",
    ),
    "DoRA whose magnitudes diffusers drops": (
        "flux",
        lambda: {
            name.replace("lora_magnitude_vector", "dora_scale"): weight
            for name, weight in dora(flux(), "flux", "transformer").items()
        },
        "only the LoRA part",
    ),
    "kohya": ("sdxl", lambda: kohya(sdxl(), alpha=2.0), "self_attn"),
    "LoKr": ("zimage", lambda: lokr(weights("zimage", 3), "zimage"), ""),
    "LoKr on joined projections": ("flux2", joined_lokr, ""),
    "LoKr of other sizes": ("zimage", lambda: lokr(weights("zimage", 3), "zimage", 8), ""),
    "a layer of a text encoder": (
        "flux",
        lambda: flux() | pair("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q", 32, 32),
        "SelfAttention.q",
    ),
    "image attention on text to video": ("wan21_t2v", image_attention, "attn2.add_k_proj"),
    "a change of a whole weight": (
        "flux", lambda: flux() | {f"{ATTENTION}.to_q.diff": torch.ones(32, 32)}, "to_q.diff",
    ),
    "a text encoder's layer that diffusers drops": (
        "flux", lambda: kohya_flux() | pair(f"lora_te3_{TEXT}", 32, 32, KOHYA), "lora_te3_encoder",
    ),
    "a change of the first layer": (
        "wan21_t2v",
        lambda: wan() | {"diffusion_model.patch_embedding.diff": torch.ones(24, 4, 1, 2, 2)},
        "patch_embedding",
    ),
    "norms that are changed": (
        "wan21_t2v",
        lambda: wan() | {"diffusion_model.blocks.0.self_attn.norm_q.diff": torch.ones(24)},
        "norm_q",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def drives() -> Iterator[Callable[[str], Drive]]:
    """An engine of a family; the one before is closed."""
    engines, stack = dict[str, Drive](), contextlib.ExitStack()

    def drive(family: str) -> Drive:
        if family not in engines:
            stack.close()
            engines.clear()
            engines[family] = stack.enter_context(driving(family))
        return engines[family]

    with stack:
        yield drive


def register(drive: Drive, state: Mapping[str, Tensor], folder: Path) -> tuple[str, Path]:
    name = f"x{len(drive.engine.loaded.card.lora)}"
    file = write(folder / f"{name}.safetensors", dict(state))
    drive.engine.add_lora(name, file)
    return name, file


@pytest.mark.parametrize("kind", EQUAL)
def test_what_diffusers_draws_is_drawn(
    kind: str, drives: Callable[[str], Drive], tmp_path: Path
) -> None:
    family, state, warning = EQUAL[kind]
    drive = drives(family)
    name, file = register(drive, state(), tmp_path)

    picture, warnings = by_carpool(drive, [{"id": name, "scale": SCALE}], family)

    alone = by_diffusers(file, family)
    assert gap(picture, alone) < CLOSE
    assert gap(alone, pictures(plain(family), family)) > CLEAR
    assert [warning in text for text in warnings] == ([True] if warning else [])


FITTING: dict[str, tuple[str, Callable[[], State], Callable[[], State], str]] = {
    "a text encoder's layer": (
        "wan21_t2v", wan, lambda: pair("diffusion_model.text_encoder.q", 24, 24), "text_encoder",
    ),
    "a text encoder's layer, of kohya": (
        "wan21_t2v", wan, lambda: pair("lora_te_text_model_layers_0_fc1", 24, 24, KOHYA),
        "lora_te_text",
    ),
    "an adapter of a norm": ("flux", flux, lambda: pair(f"{ATTENTION}.norm_q", 16, 16), "norm_q"),
    "a norm": ("flux", flux, lambda: {f"{ATTENTION}.norm_q.weight": torch.ones(16)}, "norm_q"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FITTING)
def test_what_fits_is_applied_where_diffusers_refuses_the_rest(
    kind: str, drives: Callable[[str], Drive], tmp_path: Path
) -> None:
    family, fitting, stray, named = FITTING[kind]
    drive = drives(family)
    name, _ = register(drive, fitting() | stray(), tmp_path)

    picture, [warning] = by_carpool(drive, [{"id": name, "scale": SCALE}], family)

    alone = by_diffusers(write(tmp_path / "fitting.safetensors", fitting()), family)
    assert gap(picture, alone) < CLOSE
    assert named in warning
    assert "find no place" in warning


REFUSED: dict[str, tuple[Callable[[], State], str]] = {
    "infinite values": (
        lambda: flux() | {next(iter(flux())): torch.full((4, 32), torch.inf)}, "NaN or infinite",
    ),
    "a vector for a matrix": (
        lambda: flux() | {n: torch.ones(32) for n in flux() if n.endswith("lora_B.weight")},
        "must be a matrix",
    ),
    "integers": (lambda: as_type(torch.int8), "of torch.int8: must be a matrix of real numbers"),
    "a control adapter": (lambda: flux() | pair("transformer.x_embedder", 32, 32), "widens it"),
    "LyCORIS": (
        lambda: {f"lora_unet_x.{n}": torch.ones(4) for n in ("weight", "on_input")}, "the IA3",
    ),
    "scaled float8": (
        lambda: as_type(torch.float8_e4m3fn) | {"x.scale_weight": torch.ones(())}, "scaled float8",
    ),
    "mostly another model": (
        lambda: dict(
            e for i in "045678" for e in pair(ATTENTION.replace("0", i) + ".to_q", 32, 32).items()
        ),
        "5 of 6 layers are not in this FluxPipeline",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_an_odd_file_is_refused_by_name(
    kind: str, drives: Callable[[str], Drive], tmp_path: Path
) -> None:
    state, reason = REFUSED[kind]
    drive = drives("flux")
    before = drive.engine.loaded.card.lora

    with pytest.raises(LoraRejected, match=reason):
        register(drive, state(), tmp_path)

    assert drive.engine.loaded.card.lora == before


# Negative alphas: loaders of diffusers that halve them never end


def halving(alpha: float) -> State:
    """A Wan adapter in names whose loader spreads an alpha over both matrices."""
    state = comfy(weights("wan21_t2v", 3, std=0.15))
    downs = [name for name in state if name.endswith("lora_A.weight")]
    return state | {name.replace("lora_A.weight", "alpha"): torch.tensor(alpha) for name in downs}


def of_sdxl(alpha: float) -> State:
    state = kohya(weights("sdxl", 3, std=0.1), alpha)
    return {name: tensor for name, tensor in state.items() if "unet" in name}


@pytest.mark.timeout(60)  # a loader that does not end
@pytest.mark.parametrize(("family", "make"), [("wan21_t2v", halving), ("sdxl", of_sdxl)])
def test_a_negative_alpha_turns_the_sign(family: str, make: object, tmp_path: Path) -> None:
    assert callable(make)
    plus, minus = (
        write(tmp_path / f"{n}.safetensors", make(a)) for n, a in {"p": 2.0, "m": -2.0}.items()
    )

    with driving(family, lora=(f"m={minus}", f"p={plus}")) as drive:
        turned, _ = by_carpool(drive, [{"id": "m", "scale": 0.7}], family)
        both, _ = by_carpool(drive, [{"id": "m"}, {"id": "p"}], family)

    assert gap(turned, by_diffusers(plus, family, -0.7)) < 5 * CLOSE
    assert gap(both, pictures(plain(family), family)) < 5 * CLOSE


@pytest.mark.timeout(60)
def test_a_negative_alpha_without_its_matrix_is_refused_by_name(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in halving(-1.0).items() if "lora_B" not in name}

    with driving("wan21_t2v") as drive, pytest.raises(LoraRejected, match=r"alpha is negative"):
        drive.engine.add_lora("x", write(tmp_path / "x.safetensors", state))


@pytest.mark.timeout(60)
def test_alphas_of_nothing_and_of_much_are_drawn(tmp_path: Path) -> None:
    for alpha in (0.0, 1e-30, 64.0):
        file = write(tmp_path / f"{alpha}.safetensors", halving(alpha))
        with driving("wan21_t2v", lora=(f"x={file}",)) as drive:
            drawn, _ = by_carpool(drive, [{"id": "x", "scale": 0.1}], "wan21_t2v")
        assert gap(drawn, by_diffusers(file, "wan21_t2v", 0.1)) < 5 * CLOSE, alpha
