"""How wide: near ties, and when a width is tried."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import AnyCurve, Costs, Curve
from carpool.schedule.learned_curve import LearnedCurve
from carpool.schedule.trials import FLOOR
from carpool.schedule.views import CallKind, ParkedCall, QueuedRequest
from carpool.schedule.widths import LONG_QUEUE, NEAR, Widths

KIND = CallKind("transformer.forward", 1024)


def line(calls: int, apart_s: float = 9.0) -> list[ParkedCall]:
    """Of requests that came one after the other; 0 seconds apart they are a burst."""
    return [
        ParkedCall(n, n, "key", 1, calls, "denoise", KIND, n * apart_s, 9.0, 9.0)
        for n in range(1, calls + 1)
    ]


def learned(true: Curve, runs: int = 8, most: int = 4) -> Costs:
    """A curve that was run at each width so often, with an uncertainty of some percent left."""
    curve = LearnedCurve()
    for rows in range(1, most + 1):
        for _ in range(runs):
            curve.learn(rows, true.seconds(rows))
    return Costs({KIND: curve})


def chosen(costs: Costs, calls: int, backlog: float, apart_s: float = 9.0) -> int:
    widths = Widths(costs, min_gain=0.05)
    width, _ = widths.choose(line(calls, apart_s), backlog)
    return width if widths.loss_s is None else 0  # a trial tells nothing about ties


@given(st.floats(1.0, 3.0), st.floats(1.0, 500.0))
def test_more_who_wait_never_make_a_forward_of_known_costs_narrower(
    last_s: float, backlog: float
) -> None:
    curve = Curve({1: 1.0, 2: 1.0 + (last_s - 1) / 3, 4: last_s})
    widths = Widths(Costs({KIND: curve}), min_gain=0.05)

    few, _ = widths.choose(line(4), min(backlog, LONG_QUEUE - 1))
    many, _ = widths.choose(line(4), backlog + LONG_QUEUE)

    assert few <= many


def test_a_near_tie_of_learned_costs_goes_to_the_wider_of_a_long_line() -> None:
    backlog = 200.0
    rounds = {n: (backlog + n) / n for n in (1, 2)}
    tie_s = 1.0 * rounds[1] / rounds[2]  # two rows in this time are as good as one
    a_little_worse, worse = (
        Curve({1: 1.0, 2: tie_s * times}) for times in (1 + NEAR / 2, 1 + 3 * NEAR)
    )

    assert chosen(learned(a_little_worse, most=2), 2, backlog) == 2
    assert chosen(learned(worse, most=2), 2, backlog) == 1
    assert chosen(Costs({KIND: a_little_worse}), 2, backlog) == 1  # known: no doubt, no tie


class Uncertain(LearnedCurve):
    """Seconds, and standard deviations of a tenth of them beyond one row."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(dict(enumerate(seconds, 1)))
        self._given = seconds
        self.learned = 1000

    def seconds(self, rows: int) -> float:
        return self._given[rows - 1]

    def sd(self, rows: int) -> float:
        return 0.1 * self._given[rows - 1] if rows > 1 else 0.0


def test_while_few_are_there_a_wider_forward_that_may_gain_nothing_is_left_alone() -> None:
    """However many are expected: those who are there wait for it."""
    backlog = 200.0
    tie_s = 2.0 * (backlog + 1) / (backlog + 2)

    def width(curve: AnyCurve, present: float) -> int:
        costs = Costs({KIND: curve})
        costs.trials.lost_s = 100.0  # nothing is tried
        return Widths(costs, min_gain=0.05).choose(line(2), backlog, present=present)[0]

    better_s, far_better_s = 0.97 * tie_s, 0.92 * tie_s
    assert width(Uncertain(1.0, better_s), 5.0) == 1
    assert width(Uncertain(1.0, far_better_s), 5.0) == 2
    assert width(Uncertain(1.0, better_s), LONG_QUEUE) == 2
    assert width(Curve({1: 1.0, 2: better_s}), 5.0) == 2  # known


def test_a_trial_is_charged_with_those_who_are_there_not_with_those_who_may_come() -> None:
    lost_s = []
    for present in (3.0, 8.0, 19.0):
        costs = Costs({KIND: Uncertain(1.0, 2.0, 3.0)})
        costs.trials.free_s = 100.0
        widths = Widths(costs, min_gain=0.05)
        widths.ran(KIND, 3, is_trial=False)
        widths.choose(line(3), 100.0, present=present)
        assert widths.loss_s is not None
        lost_s.append(widths.loss_s)

    assert lost_s[0] > 1.5 * lost_s[1] > 1.5 * lost_s[2]


@pytest.mark.parametrize(("often", "tried"), [(0.001, False), (0.5, True)])
def test_a_width_is_tried_where_lines_are_often_long_enough_for_it(
    often: float, *, tried: bool
) -> None:
    """What eight rows take is worth little to those who are next to never eight."""
    costs = Costs({KIND: Uncertain(*(1.0 * rows for rows in range(1, 9)))})
    costs.trials.free_s = 100.0
    widths = Widths(costs, min_gain=0.05)
    for forward in range(1000):
        widths.ran(KIND, 8 if forward % round(1 / often) == 0 else 1, is_trial=False)

    widths.choose(line(8), 100.0, present=8.0)

    assert (widths.loss_s is not None) == tried


def test_near_ties_do_not_add_up_from_width_to_width() -> None:
    backlog = 200.0
    steps = Curve(
        {n: n * (backlog + 1) / (backlog + n) * (1 + 0.9 * NEAR * (n - 1)) for n in (1, 2, 3, 4)}
    )

    assert chosen(learned(steps), 4, backlog) == 2  # 3 and 4 are each near the one before


def test_a_near_tie_goes_to_the_narrower_of_a_short_line() -> None:
    gains_little = Curve({1: 1.0, 2: 1.86})

    costs = learned(gains_little, most=2)

    assert chosen(costs, 2, backlog=2.0) == 1
    assert chosen(costs, 2, backlog=LONG_QUEUE * 10) == 2


def test_nobody_of_a_burst_is_left_over_for_a_round_of_one() -> None:
    """Seven rows are a little better in the mean than eight; then one is left of 8, two of 16."""
    steps_s = {1: 8.4, 2: 10.9, 3: 13.2, 4: 15.2, 5: 17.8, 6: 19.5, 7: 21.2, 8: 23.6}
    costs = Costs({KIND: Curve({rows: seconds / 1000 for rows, seconds in steps_s.items()})})

    assert chosen(costs, 8, backlog=8.0, apart_s=0.0) == 8
    assert chosen(costs, 8, backlog=16.0, apart_s=0.0) == 8
    assert chosen(costs, 8, backlog=16.0, apart_s=0.1) == 7  # others come meanwhile


def test_two_trials_are_never_made_in_a_row_so_that_each_has_something_to_compare_with() -> None:
    costs = Costs()
    widths, tried = Widths(costs, min_gain=0.05), list[bool]()
    for _ in range(200):
        width, _ = widths.choose(line(8), backlog=8.0)
        widths.ran(KIND, 8, is_trial=widths.loss_s is not None)
        if widths.loss_s is not None:
            costs.trials.ran(widths.loss_s)
        tried.append(widths.has_tried)
        costs.learn(KIND, width, 1.0 + 0.9 * (width - 1))

    assert sum(tried) >= 3
    assert not any(one and other for one, other in pairwise(tried))


@pytest.mark.parametrize("wide_s", [1.0, 1.3])
@pytest.mark.parametrize(("times", "runs"), [(5.0, 15), (20.0, 15), (10.0, 60)])
def test_a_width_of_which_a_wrong_history_says_the_worst_is_tried_and_then_kept(
    wide_s: float, times: float, runs: int
) -> None:
    costs = Costs()
    for rows, seconds in [(1, 1.0)] * 40 + [(2, times), (4, times), (1, 1.0)] * runs:
        costs.learn(KIND, rows, seconds)
    widths = Widths(costs, min_gain=0.05)
    first, _ = widths.choose(line(4), backlog=4.0)
    assert first < 4  # or the test says nothing

    ran = Counter[int]()
    while ran[4] < 200 and sum(ran.values()) < 6000:
        width, _ = widths.choose(line(4), backlog=4.0)
        is_trial = widths.loss_s is not None
        widths.ran(KIND, 4, is_trial=is_trial)
        if widths.loss_s is not None:
            assert widths.loss_s >= FLOOR * costs.curve(KIND).seconds(width) * 0.999
            costs.trials.ran(widths.loss_s)
        costs.learn(KIND, width, 1.0 + (wide_s - 1.0) * (width > 1))
        ran[width] += 1 - is_trial

    assert ran[4] == 200  # chosen, not tried


def test_a_forward_that_runs_ahead_is_no_wider_than_the_pipelines_own_code_can_feed() -> None:
    def width(own_s: float, *, runs_ahead: bool) -> int:
        costs = Costs({KIND: Curve({1: 0.010, 8: 0.011})})
        costs.learn_turn(KIND, 8, loop_s=0.0, own_s=8 * own_s)
        costs.runs_ahead = runs_ahead
        return chosen(costs, 8, backlog=8.0)

    assert width(0.0, runs_ahead=True) == 8
    assert width(0.001, runs_ahead=True) == 8  # 8 ms are hidden behind the forward
    assert width(0.005, runs_ahead=True) == 2  # two of them take as long as it does
    assert width(0.005, runs_ahead=False) > 2  # beside it, each turn costs all of it


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_turn_is_its_forward_and_what_is_beside_it_or_the_longer_of_them(
    runs_ahead: bool,
) -> None:
    costs = Costs({KIND: Curve({1: 1.0})})
    costs.learn_turn(KIND, 2, loop_s=0.2, own_s=0.6)
    costs.runs_ahead = runs_ahead

    assert costs.turn_s(KIND, 2, 1.0) == pytest.approx(1.0 if runs_ahead else 1.8)
    assert costs.turn_s(KIND, 4, 1.0) == pytest.approx(1.4 if runs_ahead else 2.4)


def test_a_device_that_is_fuller_than_predicted_runs_wider() -> None:
    """Outliers and busy phases fill it, and are in no median."""

    class Stretched(Costs):
        stretch = 1.5

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

    assert widths == [2, 3]


def test_two_who_happen_to_come_together_among_others_are_no_burst() -> None:
    """Others come as well, who fill the last round; in a burst nobody does."""
    widths = Widths(Costs({KIND: Curve({1: 1.0, 2: 1.9})}), min_gain=0.05)

    open_line, _ = widths.choose(line(2), 9.0, present=9.0)
    together, _ = widths.choose(line(2, apart_s=0.0), 9.0, present=9.0)
    burst, _ = widths.choose(line(9, apart_s=0.0)[:4], 9.0, present=9.0)

    assert (open_line, together, burst) == (1, 1, 2)
