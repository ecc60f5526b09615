"""The machine's speed: what a curve is wrong by is not taken for it, and the other way round."""

import random

import pytest

from carpool.schedule.learned_curve import LearnedCurve
from carpool.schedule.speed import MachineSpeed

ONE_S, TWO_S = 1.0, 1.5  # of one and two rows


def settled(seed: int = 0) -> tuple[LearnedCurve, random.Random]:
    """One row at the machine's usual speed, known from many runs; runs vary by 10 %."""
    curve, rng = LearnedCurve(), random.Random(seed)
    for _ in range(200):
        run(curve, 1, ONE_S * rng.lognormvariate(0, 0.1))
    return curve, rng


def run(curve: LearnedCurve, rows: int, seconds: float) -> None:
    curve.learn(rows, seconds)
    curve.now_s += 0.1


@pytest.mark.parametrize("wrong", [0.75, 1.3])
def test_a_new_width_that_is_not_as_expected_does_not_move_the_speed_however_often_it_runs(
    wrong: float,
) -> None:
    curve, rng = settled()

    for _ in range(60):
        run(curve, 2, wrong * TWO_S * rng.lognormvariate(0, 0.1))

    assert curve.speed.factor == pytest.approx(1.0, abs=0.12)
    assert curve.seconds(2) / curve.seconds(1) == pytest.approx(wrong * TWO_S / ONE_S, rel=0.12)


def test_a_machine_that_slows_down_while_a_new_width_runs_is_seen_to() -> None:
    curve, rng = settled()

    for n in range(40):
        slower = 2.0 if n >= 10 else 1.0
        run(curve, 2, slower * TWO_S * rng.lognormvariate(0, 0.1))

    assert curve.speed.factor == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_machine_that_changes_while_one_width_runs_leaves_no_trace_in_the_curve(
    times: float,
) -> None:
    """What was learned before the change was noticed is learned anew."""
    for seed in range(10):
        curve, rng = settled(seed)
        for _ in range(60):
            run(curve, 2, TWO_S * rng.lognormvariate(0, 0.1))
        before = curve.seconds(2) / curve.seconds(1)

        for _ in range(5):  # comes and goes
            for factor in (times, 1.0):
                for _ in range(20):
                    run(curve, 2, factor * TWO_S * rng.lognormvariate(0, 0.1))

        assert curve.speed.factor == pytest.approx(1.0, rel=0.15)
        assert curve.seconds(2) / curve.seconds(1) == pytest.approx(before, rel=0.06)


def test_the_usual_speed_follows_and_no_cost_changes() -> None:
    curve, rng = settled()
    for _ in range(60):
        run(curve, 1, 2 * ONE_S * rng.lognormvariate(0, 0.1))
    took_s, factor = curve.seconds(1) * curve.speed.factor, curve.speed.factor

    curve.shift(curve.speed.settle(0.5))

    assert curve.speed.factor == pytest.approx(factor**0.5)
    assert curve.seconds(1) * curve.speed.factor == pytest.approx(took_s)


def test_a_calm_machine_remembers_no_runs() -> None:
    speed, curve = MachineSpeed(), LearnedCurve()
    curve.speed = speed

    for _ in range(50):
        run(curve, 1, ONE_S)

    assert speed.is_calm
