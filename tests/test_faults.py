"""Faults on purpose strike whom they are told to, and nobody else."""

import pytest
import torch

from carpool.engine.faults import Faults
from carpool.errors import InvalidValue


def test_nothing_strikes_that_was_not_switched_on() -> None:
    def run(calls: object, rows: object) -> list[object]:
        return []

    assert Faults(()).around(run, {}) is run


def test_a_fault_of_a_seed_strikes_where_that_request_is_aboard() -> None:
    faults = Faults(["forward:memory:seed=13"])

    faults.pass_by("forward", {12, 14})
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        faults.pass_by("forward", {12, 13})


def test_a_fault_of_a_probability_strikes_that_often_and_the_same_each_time() -> None:
    def struck() -> list[int]:
        faults, hit = Faults(["forward:memory:0.1"], seed=3), []
        for n in range(1000):
            try:
                faults.pass_by("forward", set())
            except torch.OutOfMemoryError:
                hit.append(n)
        return hit

    assert 70 < len(struck()) < 130
    assert struck() == struck()


@pytest.mark.parametrize(
    "text", ["", "forward", "forward:memory", "nowhere:memory:1", "forward:melt:1"]
    + [f"forward:memory:{when}" for when in ("2", "-1", "often", "seed=x", "nan")],
)  # fmt: skip
def test_a_fault_that_does_not_exist_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(InvalidValue, match="POINT:WHAT:WHEN"):
        Faults([text])
