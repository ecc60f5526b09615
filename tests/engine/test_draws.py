"""What modules draw from the global random numbers is drawn from those of each call's request."""

import random
from collections.abc import Callable
from random import gauss
from random import random as uniform
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import ConfigMixin
from numpy.random import randn
from torch import Tensor, nn
from torch.nn import functional

from carpool.engine import random_state
from support.engine_driver import Drive, Recorder, driving, gap
from support.isolation import OneNet, build
from support.tiny import ARGUMENTS, tiny_pipeline

DRAW: dict[str, Callable[[Tensor], Any]] = {  # names are bound before any engine runs
    "torch": lambda x: torch.randn_like(x),
    "dropout": lambda x: functional.dropout(x, 0.5, training=True) - x,
    "normal numbers in place": lambda x: torch.empty_like(x).normal_(),
    "numpy": lambda x: float(np.random.rand()),
    "numpy, one normal number of two": lambda x: float(randn()),
    "Python": lambda x: uniform(),
    "Python, one normal number of two": lambda x: gauss(0.0, 1.0),
    "Python's choice": lambda x: random.choice([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
    "all": lambda x: torch.rand(1) + float(np.random.rand()) + random.random(),
}


class Net(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Draws while it is told to."""

    config_name = "config.json"
    draws: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y if self.draws is None else y + DRAW[self.draws](y)


class Noisy(OneNet):
    """Draws before, between and after the calls of its denoiser, too."""

    def __call__(
        self,
        prompt: str | None = None,
        num_inference_steps: int = 4,
        fails: bool = False,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        x = torch.randn(1, 4, generator=generator) + torch.randn(4)
        for step in range(num_inference_steps):
            x = self.net(x)
            x = x + DRAW["all"](x)
            if fails and step == 1:
                raise ValueError("on purpose")
        return {"images": self.net(x) + DRAW["all"](x)}


def made(draws: str | None = None) -> Noisy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Net().requires_grad_(False).eval()
    net.draws = draws
    return Noisy(net)


def states() -> list[Any]:
    array: Any = np.random.get_state(legacy=False)
    numbers = array["state"]["key"].tolist(), array["state"]["pos"]
    return [torch.get_rng_state().tolist(), numbers, array["gauss"], random.getstate()]


def plainly(pipe: Any, seed: int, **arguments: Any) -> Any:
    """What plain diffusers gives in a process that was just seeded."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    with torch.no_grad():
        answer = pipe(**arguments, generator=torch.Generator().manual_seed(seed))
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])
    return answer


def alone(draws: str, seed: int) -> Tensor:
    image: Tensor = plainly(made(draws), seed, prompt="")["images"]
    return image


def a_round(drive: Drive) -> list[Recorder]:
    """Four requests at once, and besides them one that fails and one that is cancelled."""
    heard = [drive.submit("", seed=seed) for seed in range(4)]
    failing = drive.submit("", seed=8, fails=True)
    cancelled = drive.submit("", seed=9, request_id="cancelled")
    drive.turn(2)
    drive.engine.cancel("cancelled")
    drive.finish()
    assert failing.error is not None
    assert cancelled.error is not None
    return heard


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("draws", DRAW)
def test_modules_draw_from_their_requests_numbers_alone_and_in_company(
    draws: str, numerics: str
) -> None:
    np.random.randn(3)  # so that a normal number of the application's is in store
    before = states()
    close = 0.0 if numerics == "exact" else 1e-6
    with driving(made(draws), numerics=numerics) as drive:
        for _ in range(2):
            for seed, one in enumerate(a_round(drive)):
                assert gap(one.image, alone(draws, seed)) <= close
            lone = drive.submit("", seed=5)
            drive.finish()
            assert gap(lone.image, alone(draws, 5)) <= close
        assert drive.widest("net") == 1

    assert states() == before


def test_pythons_numbers_stay_with_their_requests_where_its_generator_has_another_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_state, "_memory", None)
    before = states()
    with driving(made("all")) as drive:
        for seed, one in enumerate(a_round(drive)):
            assert gap(one.image, alone("all", seed)) < 1e-6

    assert states() == before


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_draws_that_begin_in_fused_forwards_are_seen_before_an_answer_leaves(numerics: str) -> None:
    pipe = made()
    with driving(pipe, numerics=numerics) as drive:
        a_round(drive), a_round(drive)  # by which it is proven to fuse
        widest = drive.widest("net")
        pipe.net.draws = "torch"
        drive.forwards.clear()
        heard = a_round(drive)
        fused = [width for width in drive.widths("net") if width > 1]
        drive.forwards.clear()
        again = a_round(drive)

    assert widest == 6
    assert len(fused) == 1  # whose answers nobody got
    assert drive.widest("net") == 1
    for one in (heard, again):
        for seed, recorder in enumerate(one):
            assert gap(recorder.image, alone("torch", seed)) < 1e-6


def test_ltxs_decoder_with_noise_gives_what_plain_diffusers_gives() -> None:
    def noisy() -> DiffusionPipeline:
        pipe = tiny_pipeline("ltx")
        config = {**pipe.vae.config, "decoder_inject_noise": (True,) * 5}
        vae = AutoencoderKLLTXVideo.from_config(config)
        for weight in vae.requires_grad_(False).parameters():
            nn.init.normal_(weight, std=0.1)
        pipe.register_modules(vae=vae)
        return pipe

    arguments = {**ARGUMENTS["ltx"], "output_type": "pt"}
    prompt = "a cat"
    expected = [plainly(build(noisy), seed, prompt=prompt, **arguments).frames for seed in range(3)]
    with driving(build(noisy), numerics="exact") as drive:
        heard = [drive.submit(prompt, seed=seed, **arguments) for seed in range(3)]
        drive.finish()

    for one, frames in zip(heard, expected, strict=True):
        assert one.error is None
        assert gap(one.outcome.fields["frames"], frames) == 0.0
