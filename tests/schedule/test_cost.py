"""Learned costs: monotone, robust to outliers, and a little hopeful about what nobody tried."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.schedule.cost import Costs, Curve
from carpool.schedule.known_curve import STEPS, TRUSTED
from carpool.schedule.monotone import monotone
from carpool.schedule.views import CallKind

LARGE = CallKind("transformer.forward", 4096)
SMALL = CallKind("transformer.forward", 1024)
SECONDS = st.floats(0.001, 100)
RUNS = st.lists(st.tuples(st.integers(1, 40), SECONDS), max_size=60)


def learned(*runs: tuple[int, float], times: int = TRUSTED) -> Curve:
    curve = Curve()
    for rows, seconds in runs:
        for _ in range(times):
            curve.learn(rows, seconds)
    return curve


@given(RUNS)
def test_more_rows_never_take_less_time_whatever_was_seen(runs: list[tuple[int, float]]) -> None:
    curve = learned(*runs, times=1)

    seconds = [curve.seconds(rows) for rows in range(1, 60)]

    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_a_width_that_ran_often_enough_has_its_median_and_an_outlier_does_not_move_it() -> None:
    curve = learned((2, 0.5), times=5)

    curve.learn(2, 60.0)

    assert curve.seconds(2) == 0.5


def test_two_runs_of_a_width_are_not_trusted_yet() -> None:
    curve = learned((1, 1.0))
    curve.learn(2, 9.0)
    curve.learn(2, 9.0)

    assert curve.measured == {1: 1.0}
    assert curve.seconds(2) == 1.5


def test_between_two_widths_seconds_go_in_a_line_and_beyond_them_they_go_on() -> None:
    curve = Curve({1: 1.0, 5: 3.0})

    assert curve.seconds(3) == 2.0
    assert curve.seconds(9) == pytest.approx(5.0)


def test_the_widest_forward_to_try_is_one_step_beyond_what_was_measured() -> None:
    curve = learned((1, 1.0))
    assert curve.widest() == 2

    for rows in STEPS:
        curve = Curve({1: 1.0, rows: 2.0})
        assert curve.widest() > rows
    assert curve.widest() == STEPS[-1] + 16


def test_a_new_width_is_seen_at_once_by_all_that_was_asked_before() -> None:
    curve = Curve({1: 1.0, 2: 2.0})
    assert (curve.speedup(2), curve.widest()) == (1.0, 3)

    for _ in range(TRUSTED):
        curve.learn(3, 2.0)

    assert (curve.speedup(3), curve.widest()) == (1.5, 4)
    assert curve.seconds(3) == 2.0


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
    assert costs.usual_s(SMALL, 1) == pytest.approx(1.0, rel=0.1)
    assert costs.stretch == pytest.approx(220 / 160, rel=0.1)


def test_a_busy_phase_makes_requests_slower_unless_they_wait_for_copies_of_weights() -> None:
    costs = Costs()
    for seconds in [1.0] * 100 + [2.0] * 60:
        costs.learn(SMALL, 1, seconds)
    computed = costs.slower
    costs.streams = {SMALL.name: 9.0}

    assert computed == pytest.approx(2.0, rel=0.1)
    assert costs.slower * costs.usual_s(SMALL, 1) == costs.seconds(SMALL, 1) == 9.0


def test_costs_survive_the_way_through_json() -> None:
    costs = Costs({LARGE: Curve({1: 1.0, 2: 1.5}), SMALL: Curve()})

    back = Costs.from_json(json.loads(json.dumps(costs.to_json())))

    assert [(kind, curve.measured) for kind, curve in back] == [(LARGE, {1: 1.0, 2: 1.5})]


@given(st.lists(st.tuples(SECONDS, st.integers(1, 9)), min_size=1, max_size=20))
def test_pooling_never_falls_and_keeps_the_weighted_mean(values: list[tuple[float, int]]) -> None:
    numbers, weights = [v for v, _ in values], [w for _, w in values]

    pooled = monotone(numbers, weights)

    assert all(a <= b + 1e-9 for a, b in pairwise(pooled))
    total = sum(n * w for n, w in values)
    assert sum(n * w for n, w in zip(pooled, weights, strict=True)) == pytest.approx(total)


@given(st.lists(SECONDS, max_size=20))
def test_pooling_leaves_alone_what_already_rises(values: list[float]) -> None:
    assert monotone(sorted(values), [1] * len(values)) == sorted(values)


def test_how_uncertain_a_median_is_goes_by_how_far_its_runs_lie_apart_and_by_their_number() -> None:
    def sd(runs: Sequence[float]) -> float:
        curve = Curve()
        for seconds in runs:
            curve.learn(2, seconds)
        assert curve.runs == {2: len(runs)}
        return curve.median_sd(2)

    assert sd([1.0, 1.0, 1.0]) == 0.0
    assert sd([0.9, 1.0, 1.1]) == pytest.approx(0.107, rel=0.01)
    assert sd([0.9, 1.0, 1.1, 50.0]) < 0.2  # an outlier is no uncertainty
    assert sd([0.9, 1.0, 1.1] * 4) == pytest.approx(sd([0.9, 1.0, 1.1]) / 2)
