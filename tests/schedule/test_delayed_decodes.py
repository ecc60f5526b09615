"""Decodes wait for those who end with the next forward, when that costs less than it saves."""

from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.delayed_decodes import DelayedDecodes
from carpool.schedule.views import CallKind, ParkedCall
from carpool_lab.simulate.fleet import simulate
from carpool_lab.simulate.scenario import Labels, Model
from carpool_lab.simulate.simulator import Result, Worker
from carpool_lab.tables import WIDEST, Table
from carpool_lab.workload import Arrival

STEP, DECODE = CallKind("denoise", 1), CallKind("decode", 1)
STEP_S, DECODE_S = 1.0, 0.9
SHARED = Curve({1: DECODE_S, 4: 1.2 * DECODE_S})  # four take little longer than one
APART = Curve({1: DECODE_S, 4: 4 * DECODE_S})


def costs(decode: Curve) -> Costs:
    return Costs({STEP: Curve({1: STEP_S, 8: STEP_S}), DECODE: decode})


def denoise(number: int, steps: int, **more: Any) -> ParkedCall:
    left_s = steps * STEP_S + DECODE_S
    call = ParkedCall(number, number, STEP, 1, 8, "denoise", STEP, 0.0, left_s, 9.0)
    return replace(call, **more)


def decode(number: int, **more: Any) -> ParkedCall:
    call = ParkedCall(number, number, DECODE, 1, 4, "decode", DECODE, 0.0, DECODE_S, 9.0)
    return replace(call, **more)


def first(policy: Continuous, *parked: ParkedCall) -> str:
    return policy.choose(parked, 0.0, 0.0).calls[0].phase


ENDING = [denoise(n, 1) for n in (2, 3, 4)]


def test_a_decode_waits_for_those_who_end_next_and_all_are_decoded_together() -> None:
    policy = Continuous(costs(SHARED))

    assert first(policy, decode(1), *ENDING) == "denoise"
    together = policy.choose([decode(1), *(decode(n) for n in (2, 3, 4))], 0.0, 0.0)

    assert len(together.calls) == 4


@pytest.mark.parametrize(
    ("curve", "waiting", "denoising"),
    [
        pytest.param(APART, decode(1), ENDING, id="together they take as long as apart"),
        pytest.param(SHARED, decode(1), [denoise(2, 5), denoise(3, 5)], id="nobody ends next"),
        pytest.param(SHARED, decode(1, deadline_s=20.0), ENDING, id="it has a deadline"),
        pytest.param(SHARED, decode(1, max_rows=3), ENDING, id="they do not fit into a forward"),
    ],
)
def test_a_decode_does_not_wait_for_nothing(
    curve: Curve, waiting: ParkedCall, denoising: list[ParkedCall]
) -> None:
    assert first(Continuous(costs(curve)), waiting, *denoising) == "decode"


def test_a_decode_waits_only_once() -> None:
    policy = Continuous(costs(SHARED))
    others = [denoise(n, 1) for n in range(2, 5)]

    assert first(policy, decode(1), *others) == "denoise"

    assert first(policy, decode(1), *others) == "decode"  # their ends were foretold wrongly


@dataclass(slots=True)
class Never(DelayedDecodes):
    """Decodes that never wait."""

    def wait(self, *calls: Any) -> bool:
        return False


class Hasty(Continuous):
    """The same policy, but decodes never wait."""

    def __post_init__(self) -> None:
        Continuous.__post_init__(self)
        self._decodes = Never(self.costs)


def played(policy: type[Continuous], arrivals: list[Arrival], seconds: Curve) -> Result:
    table = Table("m-512", 4, {1: 1.0, 4: 2.0, 8: 3.0}, 0.2, DECODE_S)
    model = Model([table])
    curves = dict(model.costs)
    curves[table.kind("decode")] = seconds
    model.costs = Costs(curves)
    worker = Worker(policy(model.costs), model.costs, WIDEST, is_traced=True)
    simulate(model.requests(arrivals, Labels()), [worker])
    return worker.result


def mean_s(result: Result) -> float:
    return sum(ride.latency_s for ride in result.requests) / len(result.requests)


ARRIVALS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.4, 2.0]), st.sampled_from([2, 3, 4, 5])),
    min_size=2,
    max_size=24,
)


@given(ARRIVALS, st.sampled_from([SHARED, APART]))
def test_everybody_is_decoded_and_waiting_never_costs_much(
    asked: list[tuple[float, int]], curve: Curve
) -> None:
    now_s, arrivals = 0.0, list[Arrival]()
    for gap_s, steps in asked:
        now_s += gap_s
        arrivals.append(Arrival(now_s, {"num_inference_steps": steps}))

    waiting, hasty = (played(policy, arrivals, curve) for policy in (Continuous, Hasty))

    assert all(ride.ended_s < inf for ride in waiting.requests)
    assert mean_s(waiting) <= 1.06 * mean_s(hasty)
    if curve is APART:
        assert waiting.batches == hasty.batches


def test_under_load_of_mixed_steps_waiting_makes_decodes_fewer_and_requests_faster() -> None:
    steps = [2, 3, 4, 5, 3, 4]
    arrivals = [
        Arrival(0.55 * n, {"num_inference_steps": steps[n % len(steps)]}) for n in range(200)
    ]

    waiting, hasty = (played(policy, arrivals, SHARED) for policy in (Continuous, Hasty))

    decodes, more = (
        sum(phase == "decode" for phase, _ in result.batches) for result in (waiting, hasty)
    )
    assert decodes < 0.95 * more
    assert mean_s(waiting) < 0.99 * mean_s(hasty)
