"""Faults on purpose strike whom they are told to, and nobody else."""

from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from carpool.engine.faults import Faults
from carpool.errors import InvalidValue

STATES: Any = [SimpleNamespace(request=SimpleNamespace(seed=13))] * 2


def answered(answer: Any, fault: str = "forward:noise:1", calls: int = 2) -> Any:
    """What a call gets under a fault for this answer of its forward."""

    def run(states: Sequence[Any]) -> list[Any]:
        return [answer] * len(states)

    return Faults([fault]).around(run)(STATES[:calls])[0]


@pytest.mark.parametrize("environ", [{}, {"CARPOOL_FAULT": ""}, {"CARPOOL_FAULT": ","}])
def test_nothing_strikes_that_was_not_switched_on(environ: dict[str, str]) -> None:
    assert Faults.from_environment(environ) is None


def test_a_fault_of_a_seed_strikes_where_that_request_is_aboard() -> None:
    faults = Faults(["forward:memory:seed=13"])

    assert (faults.due("forward", {12, 14}), faults.due("forward", {12, 13})) == ([], ["memory"])
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        answered(None, "forward:memory:seed=13")
    assert answered("an answer", "forward:memory:seed=14") == "an answer"


def test_a_fault_of_a_probability_strikes_that_often_and_the_same_each_time() -> None:
    def struck() -> list[int]:
        faults = Faults(["forward:memory:0.1"], seed=3)
        return [n for n in range(1000) if faults.due("forward", set())]

    assert 70 < len(struck()) < 130
    assert struck() == struck()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_moves_the_last_bits_of_every_number_of_a_shared_forward(dtype: torch.dtype) -> None:
    exact = torch.linspace(1, 3, 1000, dtype=dtype)

    noisy = answered(exact)

    assert noisy.dtype == dtype
    assert 0 < float((noisy / exact - 1).abs().max()) < max(1e-5, 2 * torch.finfo(dtype).eps)
    assert torch.equal(exact, torch.linspace(1, 3, 1000, dtype=dtype))  # it may be asked for again
    assert answered(exact, calls=1) is exact


def test_noise_reaches_into_outputs_and_leaves_what_is_no_number_alone() -> None:
    ones, tokens = torch.ones(9), torch.arange(9)
    latents = DiagonalGaussianDistribution(torch.ones(1, 4, 2, 2))

    noisy = answered(OrderedDict(all=(ones, [ones, tokens, None]), latents=latents))

    first, (second, same, nothing) = noisy["all"]
    assert not torch.equal(first, ones)
    assert not torch.equal(first, second)
    assert (same is tokens, nothing) == (True, None)
    assert not torch.equal(noisy["latents"].mean, latents.mean)


def test_noise_draws_nothing_from_the_generator_of_all() -> None:
    before = torch.get_rng_state()

    answered(torch.ones(9))

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "text", ["", "forward", "forward:memory", "nowhere:memory:1", "forward:melt:1"]
    + [f"forward:memory:{when}" for when in ("2", "-1", "often", "seed=x", "nan")],
)  # fmt: skip
def test_a_fault_that_does_not_exist_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(InvalidValue, match="POINT:WHAT:WHEN"):
        Faults([text])
