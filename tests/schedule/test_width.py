"""How wide: the mean of rounds, and what an engine does with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind, ParkedCall, QueuedRequest
from carpool.schedule.width import LONG_QUEUE, best_width

KIND = CallKind("transformer.forward", 1024)
MIN_GAIN = 0.05


def width(*seconds: float, backlog: float) -> int:
    return best_width(enumerate(seconds, 1), backlog, MIN_GAIN)


def line(calls: int) -> list[ParkedCall]:
    return [
        ParkedCall(n, n, "key", 1, calls, "denoise", KIND, 9.0 * n, 9.0, 9.0)
        for n in range(1, calls + 1)
    ]


def chosen(costs: Costs, calls: int) -> int:
    return len(Continuous(costs).choose(line(calls), 0.0, 0.0).calls)


@pytest.mark.parametrize("backlog", [4, 19, 200])
def test_rows_that_are_free_all_run_and_rows_that_gain_nothing_run_alone(backlog: float) -> None:
    assert width(1.0, 1.0, 1.0, 1.0, backlog=backlog) == 4
    assert width(1.0, 2.0, 3.0, 4.0, backlog=backlog) == 1


def test_the_width_with_the_least_mean_of_rounds_is_taken() -> None:
    """Of 8 requests: 9 rounds of 5.5, 5 of 7, 3 of 10.4, 2 of 17."""
    seconds = {1: 5.5, 2: 7.0, 4: 10.4, 8: 17.0}

    turns = [(calls, seconds[calls]) for calls in (1, 2)]

    assert best_width(turns, 8, MIN_GAIN) == 2
    assert width(5.5, 7.0, 8.8, 10.4, 12.9, 15.0, 17.0, 19.0, backlog=8) == 4


@given(st.floats(1.0, 3.0), st.floats(1.0, 500.0))
def test_a_longer_queue_never_makes_a_forward_narrower(last_s: float, backlog: float) -> None:
    seconds = 1.0, 1.0 + (last_s - 1) / 3, 1.0 + 2 * (last_s - 1) / 3, last_s

    few = width(*seconds, backlog=min(backlog, LONG_QUEUE - 1))
    many = width(*seconds, backlog=backlog + LONG_QUEUE)

    assert few <= many


def test_rows_that_gain_less_than_the_setting_are_worth_it_only_to_a_long_queue() -> None:
    gains_little = 1.0, 1.95  # 2.6 %

    assert width(*gains_little, backlog=LONG_QUEUE - 1) == 1
    assert width(*gains_little, backlog=LONG_QUEUE * 10) == 2


def test_calls_of_two_rows_count_with_both() -> None:
    turns = [(2, 1.0), (4, 1.85)]  # 8 % for two rows

    assert best_width(turns, 19, MIN_GAIN) == 1
    assert best_width(turns, 19, 0.03) == 2


def test_a_burst_is_done_sooner_by_wider_forwards_whose_mean_is_little_worse() -> None:
    turns = list(enumerate((5.5, 7.0, 8.8, 10.4, 12.0, 14.0, 15.5, 17.0), 1))

    assert best_width(turns, 8, MIN_GAIN, is_burst=True) == 8
    assert best_width(turns, 8, MIN_GAIN) == 5


def test_a_forward_that_runs_ahead_is_no_wider_than_the_pipelines_own_code_can_feed() -> None:
    def wide(own_s: float, *, runs_ahead: bool) -> int:
        costs = Costs({KIND: Curve({1: 0.010, 8: 0.011})})
        costs.learn_turns(KIND, 8, [(0.0, 8 * own_s)])
        costs.runs_ahead = runs_ahead
        return chosen(costs, 8)

    assert wide(0.0, runs_ahead=True) == 8
    assert wide(0.001, runs_ahead=True) == 8  # 8 ms are hidden behind the forward
    assert wide(0.005, runs_ahead=True) == 2  # two of them take as long as it does
    assert wide(0.005, runs_ahead=False) > 2  # beside it, each turn costs all of it


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_turn_is_its_forward_and_what_is_beside_it_or_the_longer_of_them(
    runs_ahead: bool,
) -> None:
    costs = Costs({KIND: Curve({1: 1.0})})
    costs.learn_turns(KIND, 2, [(0.2, 0.6)])
    costs.runs_ahead = runs_ahead

    assert costs.turn_s(KIND, 2, 1.0) == pytest.approx(1.0 if runs_ahead else 1.8)
    assert costs.turn_s(KIND, 4, 1.0) == pytest.approx(1.4 if runs_ahead else 2.4)


def test_a_device_that_is_fuller_than_predicted_runs_wider() -> None:
    """Outliers and busy phases fill it, and are in no median."""

    class Stretched(Costs):
        load_ratio = 1.5

    kind, curve = CallKind("denoise", 1), Curve({1: 43.3, 2: 77.3, 4: 145.5, 8: 279.4})
    calls = [ParkedCall(n, n, "key", 1, 8, "denoise", kind, 0.0, 1200.0, 1200.0) for n in (1, 2, 3)]
    widths = []
    for costs in (Costs({kind: curve}), Stretched({kind: curve})):
        policy = Continuous(costs)
        for now_s in (0.0, 1.0):  # others are under way
            policy.choose([replace(calls[0], order=9, request=9)], 0.0, now_s)
        for n in range(1, 101):  # six tenths of what it can do, as far as was predicted
            work_s = 1200.0 * curve.speedup(8)
            policy.admit([QueuedRequest(n, 2000.0 * n, work_s, work_s)], 32, 2000.0 * n)
        widths.append(len(policy.choose(calls, 0.0, 200_000.0).calls))

    assert widths[0] < widths[1]
