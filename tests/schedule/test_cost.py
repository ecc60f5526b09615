"""Costs of a model: known curves, guesses for other kinds, busy phases, and the way to a file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.schedule.cost import Costs, Curve, TurnOverhead
from carpool.schedule.estimator import RECENT
from carpool.schedule.views import CallKind
from carpool.schedule.width import best_width

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


# What a turn takes beside its forward: two medians, one of them for each call


KIND = CallKind("transformer.forward", 1024)


def learned(*turns: tuple[float, float]) -> TurnOverhead:
    known = TurnOverhead()
    for loop_s, own_s in turns:
        known.learn(loop_s, own_s)
    return known


def test_nothing_is_taken_before_a_turn_was_seen_and_the_first_counts_at_once() -> None:
    assert TurnOverhead().seconds(8) == 0.0

    assert learned((0.002, 0.001)).seconds(8) == pytest.approx(0.010)


def test_the_loops_part_does_not_grow_with_the_calls_and_the_pipelines_does() -> None:
    known = learned(*[(0.002, 0.001)] * 9)

    assert known.seconds(1) == pytest.approx(0.003)
    assert known.seconds(8) - known.seconds(4) == pytest.approx(0.004)


def test_a_turn_that_took_a_hundred_times_as_long_moves_nothing() -> None:
    known = learned(*[(0.002, 0.001)] * 6, (0.2, 0.1), *[(0.002, 0.001)] * 6)

    assert known.to_json() == {"loop_s": 0.002, "own_s": 0.001}


def test_a_change_is_believed_once_most_of_the_last_turns_show_it() -> None:
    known = learned(*[(0.002, 0.001)] * RECENT)

    for _ in range(RECENT // 2 + 1 + RECENT // 3):
        known.learn(0.004, 0.003)

    assert known.to_json() == {"loop_s": 0.004, "own_s": 0.003}


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=80))
def test_each_part_stays_within_what_was_seen_and_more_calls_never_take_less(
    turns: list[tuple[float, float]],
) -> None:
    known = learned(*turns)

    for part, seen in ((known.loop_s, [a for a, _ in turns]), (known.own_s, [b for _, b in turns])):
        assert min(seen) <= part <= max(seen)
    assert all(known.seconds(n) <= known.seconds(n + 1) for n in range(1, 9))


def test_turns_that_are_learned_on_a_slow_machine_are_given_at_its_usual_speed() -> None:
    costs = Costs()
    for seconds in [1.0] * 20 + [2.0] * 40:
        costs.learn(KIND, 1, seconds)
    for _ in range(9):
        costs.learn_turns(KIND, 2, [(0.4, 0.4)])

    assert costs.overhead_s(KIND, 2) == pytest.approx(0.4, rel=0.15)
    assert costs.overhead_s(CallKind("another", 1), 2) == 0.0


def test_a_loop_that_takes_longer_than_a_forward_makes_wider_ones_worth_it() -> None:
    costs = Costs({KIND: Curve({1: 1.0, 4: 4.0})})  # rows gain nothing

    def width() -> int:
        turns = ((n, costs.turn_s(KIND, n, costs.baseline_s(KIND, n))) for n in range(1, 5))
        return best_width(turns, 4.0, 0.05)

    assert width() == 1

    costs.learn_turns(KIND, 1, [(30.0, 0.0)])

    assert width() == 4
