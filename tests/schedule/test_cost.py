"""Costs of a model: known curves, guesses for other kinds, busy phases, and the way to a file."""

import json

import pytest

from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind

LARGE = CallKind("transformer.forward", 4096)
SMALL = CallKind("transformer.forward", 1024)


def test_between_two_widths_seconds_go_in_a_line_and_beyond_them_they_go_on() -> None:
    curve = Curve({1: 1.0, 5: 3.0})

    assert curve.seconds(3) == 2.0
    assert curve.seconds(9) == pytest.approx(5.0)


def test_a_known_curve_learns_nothing() -> None:
    curve = Curve({1: 1.0, 2: 2.0})

    curve.learn(2, 60.0)

    assert curve.measured == pytest.approx({1: 1.0, 2: 2.0})
    assert curve.sd(2) == 0.0
    assert curve.hoped_s(2) == curve.seconds(2)


def test_speedup_is_that_of_the_best_width_not_of_the_widest() -> None:
    curve = Curve({1: 1.0, 2: 1.0, 4: 4.0})

    assert curve.speedup(1) == 1.0
    assert curve.speedup(4) == 2.0


def test_a_kind_that_never_ran_is_guessed_from_the_nearest_by_size() -> None:
    costs = Costs({SMALL: Curve({1: 1.0, 2: 1.5}), CallKind("vae.decode", 4096): Curve({1: 9.0})})

    assert costs.seconds(LARGE, 2) == 6.0
    assert costs.seconds(CallKind("other.forward", 1), 1) == Curve().seconds(1)


def test_a_guess_gives_way_to_what_is_learned() -> None:
    costs = Costs({SMALL: Curve({1: 1.0})})
    assert costs.seconds(LARGE, 1) == 4.0

    costs.learn(LARGE, 1, 2.0)

    assert costs.seconds(LARGE, 1) == pytest.approx(2.0, rel=1e-3)


def test_a_busy_phase_changes_no_usual_cost_and_counts_for_how_full_the_device_is() -> None:
    costs = Costs()
    for seconds in [1.0] * 100 + [2.0] * 60:
        costs.learn(SMALL, 1, seconds)

    assert costs.seconds(SMALL, 1) == pytest.approx(2.0, rel=0.1)
    assert costs.baseline_s(SMALL, 1) == pytest.approx(1.0, rel=0.1)
    assert costs.load_ratio == pytest.approx(220 / 160, rel=0.1)


def test_a_busy_phase_makes_requests_slower_unless_they_wait_for_copies_of_weights() -> None:
    costs = Costs()
    for seconds in [1.0] * 100 + [2.0] * 60:
        costs.learn(SMALL, 1, seconds)
    computed = costs.slowdown
    costs.streams = {SMALL.name: 9.0}

    assert computed == pytest.approx(2.0, rel=0.1)
    assert costs.slowdown * costs.baseline_s(SMALL, 1) == costs.seconds(SMALL, 1) == 9.0


def test_costs_survive_the_way_through_json() -> None:
    costs = Costs({LARGE: Curve({1: 1.0, 2: 1.5}), SMALL: Curve()})

    back = Costs.from_json(json.loads(json.dumps(costs.to_json())))

    assert [(kind, curve.measured) for kind, curve in back] == [(LARGE, {1: 1.0, 2: 1.5})]
