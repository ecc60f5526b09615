"""The machine's speed: what a curve is wrong by is not taken for it."""

import random

import pytest

from carpool.schedule.speed import MachineSpeed
from carpool.types import CallKind

KIND = CallKind("transformer.forward", 1024)
ONE, TWO = (KIND, 1), (KIND, 2)
SURE, DOUBTFUL = 0.03, 0.2  # uncertainty of a curve, relative


def settled(seed: int = 0) -> tuple[MachineSpeed, random.Random]:
    """A machine at its usual speed, known from many runs of one row; runs vary by 10 %."""
    speed, rng = MachineSpeed(), random.Random(seed)
    for n in range(200):
        speed.learn(ONE, rng.lognormvariate(0, 0.1), 1.0, SURE, 0.1 * n)
    return speed, rng


@pytest.mark.parametrize("wrong", [0.75, 1.3])
def test_a_curve_that_is_wrong_by_a_third_does_not_move_the_speed_however_often_it_runs(
    wrong: float,
) -> None:
    speed, rng = settled()

    for n in range(60):
        speed.learn(TWO, wrong * 1.5 * rng.lognormvariate(0, 0.1), 1.5, DOUBTFUL, 20 + 0.15 * n)

    assert speed.factor == pytest.approx(1.0, abs=0.12)


def test_a_machine_that_slows_down_while_a_doubtful_width_runs_is_seen_to() -> None:
    speed, rng = settled()

    for n in range(40):
        slower = 2.0 if n >= 10 else 1.0
        speed.learn(TWO, slower * rng.lognormvariate(0, 0.1), 1.0, DOUBTFUL, 20 + 0.1 * n)

    assert speed.factor == pytest.approx(2.0, rel=0.2)


def test_a_curve_that_learns_in_the_meantime_takes_its_error_with_it() -> None:
    speed, _ = settled()
    for n in range(10):
        speed.learn(TWO, 2.0, 1.5, DOUBTFUL, 20 + 0.15 * n)
    before = speed.factor

    for n in range(30):  # the fit says by now what is seen
        speed.learn(TWO, 2.0, 2.0 / before, SURE, 22 + 0.15 * n)

    assert speed.factor == pytest.approx(before, rel=0.06)
