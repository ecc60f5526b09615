"""Adapters with negative alphas: loaders of diffusers that halve them never end."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from carpool.errors import LoraRejected
from support.engine_driver import CLOSE, driving, gap, plain
from support.lora_files import comfy, kohya, weights, write
from support.lora_pictures import by_carpool, by_diffusers, pictures

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",  # diffusers' Euler with numpy 2
    "ignore:Already found a `peft_config`:UserWarning",
)
State = dict[str, Tensor]


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
