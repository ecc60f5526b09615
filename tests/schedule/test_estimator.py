"""Learned costs: robust to cold runs, busy minutes and wrong tables; no width avoided for ever."""

import random
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import exp, inf, log

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind, ParkedCall

KIND = CallKind("transformer.forward", 1024)
OTHER = CallKind("vae.decode", 1024)
TRUE_S = {1: 5.5, 2: 7.0, 3: 8.8, 4: 10.4, 5: 12.0, 6: 14.0, 8: 17.0}  # of `shapes`, ms
TRUE = Curve(TRUE_S)
GAINS_LITTLE = {1: 0.1, 8: 0.77}  # seconds
FLAT = Curve({1: 1.0, 16: 1.0})


def learned(*runs: tuple[int, float], times: int = 4) -> Curve:
    curve = Curve()
    for _ in range(times):
        for rows, seconds in runs:
            curve.learn(rows, seconds)
    return curve


def parked(count: int, max_rows: int = 8) -> list[ParkedCall]:
    """Calls of requests that came one after the other: no burst."""
    return [
        ParkedCall(n, n, "key", 1, max_rows, "denoise", KIND, n * 20.0, 10.0, 10.0)
        for n in range(1, count + 1)
    ]


def play(
    costs: Costs,
    forwards: int,
    true: Callable[[int], float],
    *,
    line: int = 8,
    noise: float = 0.05,
    seed: int = 0,
) -> list[int]:
    """Widths that the policy chooses for a line that stays as long, and learns from."""
    rng, policy, widths = random.Random(seed), Continuous(costs), []
    calls = parked(line)
    for _ in range(forwards):
        width = len(policy.choose(calls, 0.0, 0.0).calls)
        costs.learn(KIND, width, true(width) * rng.lognormvariate(0, noise))
        widths.append(width)
    return widths


# The curve


def test_a_cold_run_of_a_width_is_ignored_and_four_warm_ones_mend_three() -> None:
    curve = learned((1, 5.5), times=5)
    curve.learn(2, 47.0)

    assert curve.seconds(2) < 12

    for _ in range(2):
        curve.learn(2, 47.0)
    for _ in range(4):
        curve.learn(2, 7.1)

    assert curve.seconds(2) == pytest.approx(7.1, rel=0.05)


@pytest.mark.parametrize("wrong", [2, 3, 4, 6])
def test_a_table_4_times_too_high_at_one_width_is_nearly_ignored_there(wrong: int) -> None:
    table = {**TRUE_S, wrong: TRUE_S[wrong] * 4}

    curve = Curve(table, 1.0)

    assert curve.seconds(wrong) == pytest.approx(TRUE_S[wrong], rel=0.25)


@pytest.mark.parametrize(
    "true",
    [
        pytest.param({1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1}, id="flat"),
        pytest.param({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, id="linear"),
        pytest.param({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0, 16: 4.0, 32: 8.0}, id="saturates at 4"),
        pytest.param({1: 1.0, 2: 1.1, 3: 2.0, 4: 2.1, 8: 3.0}, id="odd at 3"),
    ],
)
def test_a_width_that_ran_often_has_what_it_took_whatever_the_shape(
    true: Mapping[int, float],
) -> None:
    curve = learned(*true.items(), times=15)

    for rows, seconds in true.items():
        assert curve.seconds(rows) == pytest.approx(seconds, rel=0.05)
        assert curve.sd(rows) < 0.08 * seconds


def test_widths_that_nobody_ran_are_uncertain_the_more_the_farther() -> None:
    curve = learned((1, 1.0), (2, 1.5))

    relative = [curve.sd(rows) / curve.seconds(rows) for rows in (2, 4, 8, 16)]

    assert relative == sorted(relative)


def test_what_was_not_seen_for_long_becomes_uncertain_again() -> None:
    curve = learned((1, 1.0), (4, 2.0), times=10)
    fresh = curve.sd(4)

    for _ in range(2000):
        curve.learn(1, 1.0)

    assert curve.sd(4) > 1.5 * fresh


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 100)), min_size=1, max_size=60))
def test_more_rows_never_take_less_time_whatever_was_seen(runs: list[tuple[int, float]]) -> None:
    curve = learned(*runs, times=2)

    seconds = [curve.seconds(rows) for rows in range(1, 80)]

    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(seconds))
    assert seconds[0] > 0


def test_the_fit_has_one_unit_for_all_models() -> None:
    table = {1: 1.0, 2: 1.3, 8: 4.0}

    slow, fast = (Curve({n: s / unit for n, s in table.items()}) for unit in (1, 1000))

    for rows in range(1, 17):
        assert fast.seconds(rows) * 1000 == pytest.approx(slow.seconds(rows), rel=1e-3)
        assert fast.sd(rows) * 1000 == pytest.approx(slow.sd(rows), rel=1e-3)


# The speed of the machine


def test_a_busy_minute_makes_everything_slower_and_no_width_worse() -> None:
    costs, rng = Costs(), random.Random(0)

    def run(forwards: int, slower: float) -> None:
        for n in range(forwards):
            rows = (1, 2, 4)[n % 3]
            costs.learn(KIND, rows, slower * TRUE.seconds(rows) * rng.lognormvariate(0, 0.1) / 1000)

    run(60, 1.0)
    before = {rows: costs.curve(KIND).seconds(rows) for rows in (1, 2, 4)}
    run(60, 2.0)

    assert costs.slowdown == pytest.approx(2.0, rel=0.15)
    assert costs.seconds(KIND, 4) == pytest.approx(2 * before[4], rel=0.15)
    after = {rows: costs.curve(KIND).seconds(rows) for rows in (1, 2, 4)}
    assert after[4] / after[1] == pytest.approx(before[4] / before[1], rel=0.1)

    run(60, 1.0)

    assert costs.seconds(KIND, 4) == pytest.approx(before[4], rel=0.15)


def test_a_wide_forward_looks_no_cheaper_because_busy_phases_end_while_it_runs() -> None:
    """A line that has grown in a busy phase is worked off wide, and quiet comes meanwhile."""

    def error(seed: int) -> float:
        costs, rng = Costs(), random.Random(seed)
        for slower, rows, runs in 4 * ((1, 1, 40), (2, 1, 10), (2, 8, 6), (1, 8, 6)):
            for _ in range(runs):
                costs.learn(KIND, rows, slower * GAINS_LITTLE[rows] * rng.lognormvariate(0, 0.2))
        curve = costs.curve(KIND)
        return log(curve.seconds(8) / curve.seconds(1) / 7.7)

    assert -0.15 < statistics.fmean(map(error, range(20))) < 0.1


def test_a_width_that_runs_all_the_time_is_known_to_a_few_percent_however_runs_vary() -> None:
    errors = []
    for seed in range(10):
        rng, costs = random.Random(seed), Costs()
        for _ in range(600):
            costs.learn(KIND, 1, 0.1 * rng.lognormvariate(0, 0.2))
        errors.append(costs.baseline_s(KIND, 1) / 0.1 - 1)

    assert statistics.fmean(error**2 for error in errors) ** 0.5 < 0.04


def test_a_busy_minute_of_a_width_that_runs_all_the_time_counts_as_little_as_before() -> None:
    curve = Curve()
    for step in range(1600):
        curve.learn(1, 0.2 if step >= 1000 else 0.1)

    assert curve.seconds(1) == pytest.approx(0.1, rel=0.12)


def test_how_long_forwards_take_on_average_counts_outliers_and_medians_do_not() -> None:
    costs = Costs()
    for step in range(3000):
        costs.learn(KIND, 1, 1.0 if step % 100 == 50 else 0.1)  # one in a hundred: ten times

    assert costs.seconds(KIND, 1) == pytest.approx(0.1, rel=0.03)
    assert costs.load_ratio == pytest.approx(1.09, rel=0.03)


def test_one_forward_that_took_an_hour_does_not_fill_the_device_for_ever() -> None:
    costs = Costs()
    for _ in range(200):
        costs.learn(KIND, 1, 0.1)
    costs.learn(KIND, 1, 3600.0)

    assert costs.load_ratio < 1.2


def test_one_kind_tells_the_speed_of_the_machine_for_all() -> None:
    costs = Costs()
    for _ in range(20):
        costs.learn(KIND, 1, 1.0)
        costs.learn(OTHER, 1, 3.0)
    for _ in range(20):
        costs.learn(KIND, 1, 2.0)

    assert costs.seconds(OTHER, 1) == pytest.approx(6.0, rel=0.1)


def test_where_one_width_has_changed_and_not_the_machine_the_next_width_tells() -> None:
    costs = Costs()
    for _ in range(20):
        costs.learn(KIND, 1, 1.0)
        costs.learn(KIND, 2, 1.5)
    for _ in range(10):
        costs.learn(KIND, 2, 0.5 * 1.5)  # its kernel was tuned, say
    for _ in range(5):  # most of the last nine
        costs.learn(KIND, 1, 1.0)

    assert costs.slowdown == pytest.approx(1.0, rel=0.15)
    assert costs.seconds(KIND, 1) == pytest.approx(1.0, rel=0.15)


def test_what_runs_for_weeks_at_changing_speeds_stays_known() -> None:
    """Nothing overflows, vanishes, or loses its sense by rounding."""
    rng, costs, slower = random.Random(0), Costs(), 1.0
    true_s = {KIND: 5.0, OTHER: 0.5}
    kind, rows = KIND, 1
    for _ in range(8000):
        if rng.random() < 0.01:
            slower = rng.choice((0.5, 1, 1, 1, 2, 10))
        if rng.random() < 0.1:
            kind, rows = rng.choice((KIND, OTHER)), rng.choice((1, 2, 3, 4, 8))
        costs.learn(kind, rows, slower * true_s[kind] * rows**0.8 * rng.lognormvariate(0, 0.2))
    for _ in range(40):
        for kind in true_s:
            costs.learn(kind, 2, true_s[kind] * 2**0.8)

    for kind, alone_s in true_s.items():
        curve = costs.curve(kind)
        for rows in (1, 2, 4, 8):
            assert costs.seconds(kind, rows) == pytest.approx(alone_s * rows**0.8, rel=0.2)
            assert 0 <= curve.sd(rows) < inf


def test_a_table_keeps_its_proportions_where_the_usual_speed_of_the_machine_changes() -> None:
    """Those of its widths that did not run are in the same units as those that did."""
    costs = Costs({KIND: Curve({1: 1.0, 2: 1.5, 4: 2.5, 8: 4.5}, 1.0)})
    for _ in range(3000):  # the device is three times as fast by now, and so usually
        costs.learn(KIND, 4, 2.5 / 3)

    kept = costs.curve(KIND)

    assert kept.seconds(1) < 0.8
    assert kept.seconds(4) / kept.seconds(1) < 2.5 * 1.15


# The choice of width


def test_a_server_that_knows_nothing_finds_the_best_width_soon() -> None:
    widths = play(Costs(), 60, lambda n: TRUE.seconds(n) / 1000)

    ideal = min(mean_of_rounds(TRUE, n) for n in range(1, 9))
    assert sum(mean_of_rounds(TRUE, n) for n in widths[20:]) / 40 < 1.05 * ideal


@pytest.mark.parametrize("wrong", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("times", [0.25, 4.0])
@pytest.mark.parametrize(
    "true", [TRUE, FLAT, Curve({1: 1.0, 8: 7.9})], ids=("bent", "flat", "line")
)
def test_a_table_wrong_by_4_times_at_any_width_is_mended_within_200_forwards(
    true: Curve, wrong: int, times: float
) -> None:
    table = {n: true.seconds(n) / 1000 for n in (1, 2, 3, 4, 6, 8)}
    table[wrong] *= times
    costs = Costs.from_json(
        [{"name": KIND.name, "size": KIND.size, "detail": "", "seconds": table}], weight=0.6
    )

    widths = play(costs, 200, lambda n: true.seconds(n) / 1000, line=8)

    ideal = min(mean_of_rounds(true, n) for n in range(1, 9))
    late = [mean_of_rounds(true, n) / ideal for n in widths[150:]]
    assert sum(late) / len(late) < 1.03


@pytest.mark.parametrize(("widths", "wrong"), [((1, 8), 8), ((4, 8), 8), ((1, 8), 1), ((4, 8), 4)])
@pytest.mark.parametrize("times", [0.25, 4.0])
def test_a_table_of_two_widths_of_which_one_is_wrong_is_mended_within_200_forwards(
    widths: tuple[int, ...], wrong: int, times: float
) -> None:
    """Nothing in the table contradicts it."""
    table = {n: TRUE.seconds(n) / 1000 * (times if n == wrong else 1) for n in widths}
    costs = Costs({KIND: Curve(table, 1.0)})

    chosen = play(costs, 200, lambda n: TRUE.seconds(n) / 1000, line=8)

    ideal = min(mean_of_rounds(TRUE, n) for n in range(1, 9))
    assert sum(mean_of_rounds(TRUE, n) / ideal for n in chosen[150:]) / 50 < 1.05


def mean_of_rounds(true: Curve, width: int, line: int = 8) -> float:
    return true.seconds(width) / width * (line + width)


@given(
    st.lists(st.tuples(st.integers(1, 16), st.floats(-2.3, 2.3).map(exp)), max_size=80),
    st.integers(2, 16),
)
@example([(1, 7.4), (9, 1.0), (9, 7.4)], 5)  # the slowest of some hundreds: 990 forwards
@example([(9, 10.0), (9, 0.1), (4, 10.0), (9, 10.0)], 4)
@example([(2, 10.0), (1, 0.1), (9, 1.0), (16, 10.0), (11, 7.3), (15, 1.0)], 9)
def test_no_width_is_avoided_for_ever_whatever_was_learned(
    history: list[tuple[int, float]], line: int
) -> None:
    costs = Costs()
    for rows, seconds in history:
        costs.learn(KIND, rows, seconds)
    policy, calls, widths = Continuous(costs), parked(line, max_rows=16), []

    for _ in range(2500):
        widths.append(len(policy.choose(calls, 0.0, 0.0).calls))
        costs.learn(KIND, widths[-1], 1.0)
        if widths[-1] == line:
            break

    assert widths[-1] == line  # rows are free by now: all of the line is best


def test_trials_lose_little_where_rows_gain_nothing() -> None:
    slow_s = Curve({1: 1.0, 16: 16.5})

    widths = play(Costs(), 3000, slow_s.seconds, line=16, noise=0.2)

    assert max(widths[1000:]) > 1  # some are tried still
    lost_s = sum(slow_s.seconds(n) - n for n in widths[100:])  # against one after the other
    assert lost_s < 0.02 * sum(slow_s.seconds(n) for n in widths[100:])


@pytest.mark.parametrize("wrong", [0.75, 1.3])
def test_a_new_width_that_is_not_as_expected_does_not_move_the_speed_however_often_it_runs(
    wrong: float,
) -> None:
    rng, costs = random.Random(0), Costs()
    for rows, seconds, runs in ((1, 1.0, 200), (2, wrong * 1.5, 60)):
        for _ in range(runs):
            costs.learn(KIND, rows, seconds * rng.lognormvariate(0, 0.1))

    curve = costs.curve(KIND)
    assert costs.slowdown == pytest.approx(1.0, abs=0.12)
    assert curve.seconds(2) / curve.seconds(1) == pytest.approx(wrong * 1.5, rel=0.12)


def test_a_machine_that_slows_down_while_a_new_width_runs_is_noticed() -> None:
    rng, costs = random.Random(0), Costs()
    for rows, seconds, runs in ((1, 1.0, 200), (2, 1.5, 10), (2, 3.0, 30)):
        for _ in range(runs):
            costs.learn(KIND, rows, seconds * rng.lognormvariate(0, 0.1))

    assert costs.slowdown == pytest.approx(2.0, rel=0.2)


def test_a_curve_may_be_asked_by_another_thread_while_it_learns() -> None:
    # whoever submits a request asks what it will take, while the engine's thread learns
    curve = Curve()

    def ask() -> bool:
        return all(curve.seconds(rows) > 0 for _ in range(300) for rows in (1, 3, 40))

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask)
        for run in range(600):
            curve.learn(1 + run % 30, 1.0)
        assert asked.result(20)
