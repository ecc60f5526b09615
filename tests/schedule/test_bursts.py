"""Requests that come at once: encoded together, in forwards as wide as pays.

A device as `shapes` is on a CPU, under a virtual clock; forwards are counted.
"""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest

from carpool.schedule.batch_modes import Dynamic
from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.policy import Policy
from carpool.schedule.views import ParkedCall
from carpool_lab.simulate.fleet import simulate
from carpool_lab.simulate.scenario import Labels, Model
from carpool_lab.simulate.simulator import Worker
from carpool_lab.tables import MAX_ROWS, Table
from carpool_lab.workload import Arrival

STEP_S = {1: 0.0055, 2: 0.0070, 3: 0.0088, 4: 0.0104, 5: 0.0120, 6: 0.0140, 8: 0.0170}
TABLE = Table("shapes-64", 12, STEP_S, encode_s=0.004, decode_s=0.0074)
CLIENTS, BURSTS = 16, 8
MIXED = (6, 9, 14, 20)


@dataclass
class Varying:
    """A machine whose forwards vary by a tenth; beside neighbours they take up to 2.2 times."""

    rng: random.Random
    is_busy: bool = False
    phase: tuple[float, float] = (0.0, 1.0)  # until when, and how many times as long

    def factor(self, now_s: float, *forward: object) -> float:
        if self.is_busy and now_s >= self.phase[0]:
            until_s = now_s + self.rng.uniform(0.2, 1.2)
            self.phase = until_s, self.rng.choice([1.0, 1.0, 1.5, 2.2])
        return self.phase[1] * self.rng.lognormvariate(0.0, 0.1)


@dataclass(frozen=True)
class Burst:
    """What one came to."""

    forwards: Counter[str]
    took_s: float  # until the last of it was done
    mean_s: float  # latency


def bursts(
    policy: Policy,
    steps: tuple[int, ...],
    beliefs: Costs | None = None,
    cap: int = 8,
    *,
    is_busy: bool = False,
) -> list[Burst]:
    """Bursts of 16, each when the one before is done long since."""
    model = Model([TABLE])
    model.costs = true()
    arrivals = [
        Arrival(2.0 * burst, {"num_inference_steps": steps[n % len(steps)]})
        for burst in range(BURSTS)
        for n in range(CLIENTS)
    ]
    machine = Varying(random.Random(0), is_busy)
    max_rows = {**MAX_ROWS, "denoise": cap}
    worker = Worker(policy, model.costs, max_rows, 0.0, machine, beliefs, is_traced=True)  # type: ignore[arg-type]
    done = simulate(model.requests(arrivals, Labels()), [worker])
    edges = pairwise(range(0, CLIENTS * BURSTS + 1, CLIENTS))
    return [
        Burst(
            Counter(phase for phase, names in done.batches if first < names[0] <= last),
            max(ride.ended_s for ride in done.requests[first:last]) - arrivals[first].at_s,
            sum(ride.latency_s for ride in done.requests[first:last]) / CLIENTS,
        )
        for first, last in edges
    ]


def true() -> Costs:
    return Costs({
        TABLE.kind("encode"): Curve({1: 0.004, 8: 0.005}), TABLE.kind("denoise"): Curve(STEP_S),
        TABLE.kind("decode"): Curve({1: 0.0074, 4: 0.023}),
    })  # fmt: skip


def ours(costs: str, steps: tuple[int, ...], cap: int = 8, *, is_busy: bool = False) -> list[Burst]:
    """Bursts in `continuous`, from the first one on, in which learned costs are not known yet."""
    beliefs = Costs() if costs == "learned" else None
    policy = Continuous(true() if beliefs is None else beliefs)
    return bursts(policy, steps, beliefs, cap, is_busy=is_busy)


@pytest.mark.parametrize("cap", [4, 8])
@pytest.mark.parametrize("costs", ["known", "learned"])
@pytest.mark.parametrize("machine", ["quiet", "busy"])
def test_equal_requests_of_a_burst_share_as_wide_forwards_as_in_dynamic(
    costs: str, cap: int, machine: str
) -> None:
    """From the first burst on, whatever neighbours make of the seconds that are learned."""
    theirs = bursts(Dynamic(max_size=cap, delay_s=0.005), (12,), cap=cap)

    for one, other in zip(ours(costs, (12,), cap, is_busy=machine == "busy"), theirs, strict=True):
        assert one.forwards["encode"] <= 3
        assert other.forwards["denoise"] == 12 * CLIENTS // cap
        assert one.forwards["denoise"] <= other.forwards["denoise"] + 2  # once one runs alone
        if machine == "quiet":  # requests stay in step, and end together
            assert one.forwards["denoise"] <= other.forwards["denoise"] + 1
            assert one.forwards["decode"] <= other.forwards["decode"] + 1
            assert one.took_s <= other.took_s / 0.97
            assert one.mean_s <= 1.05 * other.mean_s


def test_rows_that_gain_nothing_run_one_by_one_in_a_burst_as_soon_as_a_lone_one_has_shown_it() -> (
    None
):
    costs, kind = Costs(), TABLE.kind("denoise")
    for rows in (1, 8):
        costs.learn(kind, rows, *[rows * 0.01] * 32)
    calls = [ParkedCall(n, n, "key", 1, 8, "denoise", kind, 0.0, 0.1, 0.1) for n in range(1, 9)]

    assert len(Continuous(costs).choose(calls, 0.0, 0.0).calls) == 1


@pytest.mark.parametrize("costs", ["known", "learned"])
def test_mixed_requests_of_a_burst_are_encoded_together_and_done_no_later(costs: str) -> None:
    theirs = bursts(Dynamic(max_size=8, delay_s=0.005), MIXED)[2:]

    for one, other in zip(ours(costs, MIXED)[2:], theirs, strict=True):
        assert one.forwards["encode"] <= 3  # `dynamic` needs one for each number of steps
        assert one.took_s <= other.took_s / 0.95
        assert one.mean_s <= 1.05 * other.mean_s
