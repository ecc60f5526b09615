"""Which calls share a sweep over streamed weights."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from carpool.schedule.batch_modes import together
from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.sweep import choose_sweep, step_seconds, sweep_s
from carpool.schedule.views import Admission, CallKind, Choice, ParkedCall, QueuedRequest
from carpool_lab.simulate.scenario import Comparison, Model, compare, mix
from carpool_lab.tables import siblings, table

SMALL, LARGE = CallKind("transformer.forward", 1), CallKind("transformer.forward", 4)
ENCODER, OTHER = CallKind("text_encoder.forward", 1), CallKind("unet.forward", 1)


def costs(stream_s: float = 1.0) -> Costs:
    made = Costs({
        SMALL: Curve({1: 0.1, 8: 0.8}), LARGE: Curve({1: 0.4, 8: 3.2}), ENCODER: Curve({1: 0.05}),
        OTHER: Curve({1: 0.1}),
    })  # fmt: skip
    made.streams = {SMALL.name: stream_s}
    return made


def call(number: int, kind: CallKind = SMALL, **more: Any) -> ParkedCall:
    phase, key = "encode" if kind is ENCODER else "denoise", more.pop("key", 0)
    given = {"max_rows": 8, "left_s": 10.0, "whole_s": 20.0, "phase": phase, **more}
    return ParkedCall(number, number, (kind, key), kind=kind, **given)


@dataclass
class Lines:
    """Chooses the first key, all of it; notes what it was asked."""

    asked: list[int] = field(default_factory=list)

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        return Admission(())

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        self.asked.append(len(parked))
        return together(parked)


def chosen(parked: Sequence[ParkedCall], known: Costs | None = None) -> list[list[int]]:
    choices = choose_sweep(Lines(), parked, 0.0, 0.0, known or costs())
    return [[one.request for one in choice.calls] for choice in choices]


def test_sizes_share_a_sweep_until_computing_hides_the_copies() -> None:
    assert chosen([call(1), call(2, LARGE), call(3)]) == [[1, 3], [2]]
    assert chosen([call(1, LARGE), call(2, LARGE), call(3, LARGE), call(4)]) == [[1, 2, 3]]


def test_resident_weights_give_one_forward() -> None:
    assert chosen([call(1), call(2, LARGE)], costs(stream_s=0.0)) == [[1]]
    assert chosen([call(1, OTHER), call(2)]) == [[1]]


def test_what_would_lower_the_rate_waits_for_the_next_sweep() -> None:
    many = [call(number) for number in range(1, 8)]  # 0.7 s

    assert chosen([*many, call(8, LARGE)]) == [[1, 2, 3, 4, 5, 6, 7]]
    assert chosen([*many[:2], call(8, LARGE), call(9, LARGE)]) == [[1, 2], [8, 9]]


def test_a_deadline_is_not_put_off_by_calls_that_the_copies_do_not_hide() -> None:
    dated = call(1, LARGE, deadline_s=50.0)
    others = [call(2, LARGE), call(3, LARGE), call(4, LARGE)]

    choices = choose_sweep(Lines(), [dated, *others], 0.0, 0.0, costs(stream_s=1.0))
    assert sweep_s(choices, costs()) > 1.0  # one key: the policy's own choice
    parked = [dated, *(call(n, LARGE, key=n) for n in (2, 3, 4))]
    choices = choose_sweep(Lines(), parked, 0.0, 0.0, costs(stream_s=1.0))
    assert [[one.request for one in choice.calls] for choice in choices] == [[1], [2]]
    assert sweep_s(choices, costs()) == 1.0


def test_a_call_that_cannot_pause_shares_no_sweep() -> None:
    parked = [call(1), call(2, LARGE), call(3, LARGE, key=1)]

    choices = choose_sweep(Lines(), parked, 0, 0, costs(), lambda one: one.request != 2)
    assert [[one.request for one in choice.calls] for choice in choices] == [[1], [3]]
    choices = choose_sweep(Lines(), parked, 0, 0, costs(), lambda one: one.request != 1)
    assert [[one.request for one in choice.calls] for choice in choices] == [[1]]


def test_newcomers_are_encoded_while_the_next_sweep_has_room_for_them() -> None:
    policy = Continuous(costs())
    parked = [call(number) for number in range(1, 4)]

    [choice] = choose_sweep(policy, [*parked, call(9, ENCODER)], 0.0, 0.0, costs())
    assert [one.request for one in choice.calls] == [9]
    full = [call(number, LARGE) for number in range(1, 4)]
    lines = Lines()
    choose_sweep(lines, [*full, call(9, ENCODER)], 0.0, 0.0, costs())
    assert lines.asked[0] == 4  # it decides by itself


def test_every_parked_call_is_chosen_at_most_once_and_the_policy_is_asked_little() -> None:
    policy, parked = Lines(), [call(n, key=n) for n in range(1, 40)]
    known = costs(stream_s=0.95)

    choices = choose_sweep(policy, parked, 0.0, 0.0, known)

    requests = [one.request for choice in choices for one in choice.calls]
    assert len(set(requests)) == len(requests) == len(policy.asked) == 10  # 0.1 s each
    assert all(one.deadline_s == inf for choice in choices for one in choice.calls)


def test_mixed_sizes_over_streamed_weights_are_served_three_times_as_many_in_time() -> None:
    tables = siblings(table("streamed-mixed-sizes"))
    wanted = Comparison(
        "sizes", mix("sizes", tables), ("continuous", "dynamic"), [0.9], [0, 1], 300
    )

    points = {point.mode: point.numbers for point in compare(Model(tables), wanted)}

    ours, fixed = points["continuous"], points["dynamic"]
    assert ours.goodput_qps >= 3 * fixed.goodput_qps
    assert ours.throughput_qps >= 2 * fixed.throughput_qps
    assert ours.latency.mean_s < 0.2 * fixed.latency.mean_s


# Shares, and who has waited long


def served(
    lines: dict[str, list[int]], weights: dict[str, float] | None, stream_s: float, sweeps: int
) -> tuple[dict[str, float], int]:
    """Keep requests of so many sizes parked; each tenant's part of the computing, longest wait.

    Args:
        lines: sizes of the requests of each tenant.
    """
    kinds = {size: CallKind("transformer.forward", size) for size in (1, 2, 4)}
    known = Costs({kind: Curve({1: 0.1 * n, 8: 0.8 * n}) for n, kind in kinds.items()})
    known.streams = {"transformer.forward": stream_s}
    policy, numbers, orders = Continuous(known, fair_share=weights), count(1), count(10**6)
    got, waits, longest, now_s = Counter[str](), Counter[int](), 0, 0.0

    def newcomer(tenant: str, size: int) -> ParkedCall:
        whole_s, number = 4 * known.compute_s(kinds[size], 1), next(numbers)
        more: Any = {"arrived_s": now_s, "left_s": whole_s, "whole_s": whole_s, "tenant": tenant}
        return replace(call(number, kinds[size], key=size), **more)

    parked = [newcomer(tenant, size) for tenant, sizes in lines.items() for size in sizes]
    for _ in range(sweeps):
        choices = choose_sweep(policy, parked, 0.0, now_s, known)
        now_s += sweep_s(choices, known)
        taken = [one for choice in choices for one in choice.calls]
        waits.update(one.request for one in parked)
        for one in taken:
            waits[one.request] = 0
            got[one.tenant] += one.kind.size
            parked.remove(one)
            left_s = one.left_s - one.whole_s / 4
            is_over = left_s < 1e-9
            parked.append(
                newcomer(one.tenant, one.kind.size)
                if is_over
                else replace(one, order=next(orders), left_s=left_s)
            )
        longest = max(longest, *waits.values())
    return {tenant: part / got.total() for tenant, part in got.items()}, longest


@pytest.mark.parametrize("stream_s", [0.0, 1.0, 3.0])
def test_tenants_whose_calls_share_sweeps_get_their_shares_of_the_computing(
    stream_s: float,
) -> None:
    parts, _ = served({"a": [1] * 20, "b": [4] * 4}, {"a": 1.0, "b": 1.0}, stream_s, 200)

    assert parts["a"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("stream_s", [0.0, 1.0, 3.0])
def test_a_large_call_does_not_starve_among_small_ones_of_its_tenant(stream_s: float) -> None:
    lines = {"a": [1, 2, 4] * 4, "b": [1, 2, 4] * 4}

    parts, longest = served(lines, {"a": 3.0, "b": 1.0}, stream_s, 600)

    assert longest < 300
    assert parts["a"] > 0.65  # b's ride in forwards that a leads


def test_a_sweep_does_not_make_a_policy_forget_whom_it_let_wait() -> None:
    policy, parked = Continuous(costs()), [call(1, LARGE), *(call(n, key=n) for n in range(2, 6))]
    policy._starvation._counts = {1: 5}
    policy.choose(parked[1:], 0.0, 0.0, parked)

    assert policy._starvation._counts[1] == 5


def test_a_step_of_streamed_weights_takes_longer_only_where_its_forwards_outlast_the_copies() -> (
    None
):
    kind = CallKind("denoise", 1)
    costs = Costs({kind: Curve({1: 0.5, 8: 4.0})})
    assert step_seconds(costs, kind, 2, most_rows=8, most_running=9) == [1.0, 2.0, 3.0, 4.0]

    costs.streams = {"denoise": 3.0}
    streamed = step_seconds(costs, kind, 1, most_rows=4, most_running=9)
    assert streamed == [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.5, 4.0, 4.5]


def test_calls_over_streamed_weights_that_never_ran_share_their_first_sweep() -> None:
    cold = Costs()
    cold.streams = {SMALL.name: 0.05, ENCODER.name: 0.02}

    assert chosen([call(1), call(2, LARGE), call(3, key=1)], cold) == [[1], [2], [3]]
    assert chosen([call(1), call(2, ENCODER), call(3, ENCODER)], cold) == [[2, 3]]
    assert cold.baseline_s(SMALL, 4) == 0.05
    cold.learn(SMALL, 1, 0.2)
    assert cold.seconds(SMALL, 1) == pytest.approx(0.2)
