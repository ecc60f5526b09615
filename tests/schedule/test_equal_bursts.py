"""Requests that come at once: as soon done as in the best of the other modes, and equal ones in as
few forwards, also while costs are learned on a machine with neighbours.

Devices as three tiny models are on a CPU core, under a virtual clock. Forwards take what is true;
what is learned of them is disturbed, so that counts and times say what wrong beliefs cost.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.schedule.batch_modes import Dynamic, Off, Waves
from carpool.schedule.burst import (
    SLOWER_MIXED,
    are_equal,
    best_width,
    best_width_of_mixed,
    came_at_once,
    trial_s,
)
from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.learned_curve import PRIOR, LearnedCurve
from carpool.schedule.policy import Policy
from carpool.schedule.trials import SHARE
from carpool.schedule.views import CallKind, ParkedCall, QueuedRequest
from carpool.types import Phase
from carpool_lab.simulate.fleet import simulate
from carpool_lab.simulate.simulator import SimulatedRequest, Stage, Worker
from carpool_lab.tables import WIDEST

CLIENTS = 16
EQUAL, MIXED = (6,), (6, 9, 14, 20)  # steps
DENOISE, DECODE = CallKind("transformer.forward", 1), CallKind("vae.decode", 1)
ENCODE = CallKind("text_encoder.forward", 1)
Seconds = Mapping[CallKind, Mapping[int, float]]  # by rows
SHAPES: Seconds = {
    ENCODE: {1: 0.0012, 8: 0.0022},
    DENOISE: {1: 0.0064, 2: 0.0083, 4: 0.0115, 6: 0.0143, 8: 0.0170},
    DECODE: {1: 0.0073, 2: 0.0115, 3: 0.0160, 4: 0.0205},
}
QWEN: Seconds = {
    DENOISE: {1: 0.0052, 2: 0.0080, 3: 0.0102, 4: 0.0123, 6: 0.0157, 8: 0.0192},
    DECODE: {1: 0.0080, 2: 0.0122, 3: 0.0162, 4: 0.0204},
}
FLUX: Seconds = {  # rows gain little
    DENOISE: {1: 0.0184, 2: 0.0320, 4: 0.0610, 8: 0.1160},
    DECODE: {1: 0.0059, 2: 0.0089, 4: 0.0150},
}
FLUX_ON_EPYC: Seconds = {  # 3 to 7 rows have nearly the same rate
    DENOISE: dict(enumerate((0.0143, 0.0251, 0.0349, 0.0459, 0.056, 0.0671, 0.0795, 0.0952), 1)),
    DECODE: {1: 0.0052, 2: 0.0092, 3: 0.0126, 4: 0.0157},
}
PHASES: Mapping[CallKind, Phase] = {ENCODE: "encode", DENOISE: "denoise", DECODE: "decode"}
on_every_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param(SHAPES, id="shapes"),
        pytest.param(FLUX, id="flux"),
        pytest.param(QWEN, id="qwen-image"),
    ],
)
CALLS = {id(QWEN): 2}  # of the denoiser, a step: its guidance is a call of its own


class Disturbed(Costs):
    """Learns of a machine with neighbours what runs on a quiet one."""

    def __init__(self, rng: random.Random, table: Mapping[CallKind, LearnedCurve]) -> None:
        super().__init__(table)
        self.rng, self.at_s, self.phase_s, self.seen = (
            rng,
            0.0,
            rng.expovariate(1 / 8),
            set[object](),
        )

    def learn(self, kind: CallKind, rows: int, seconds: float) -> None:
        factor = self.rng.lognormvariate(0.0, 0.2)
        if (kind, rows) not in self.seen:
            self.seen.add((kind, rows))
            factor *= 1.6  # it allocates
        if self.rng.random() < 0.01:
            factor *= 10
        self.at_s += seconds
        if self.at_s > self.phase_s:
            factor *= 2
        if self.at_s > self.phase_s + 2.0:
            self.phase_s = self.at_s + self.rng.expovariate(1 / 8)
        super().learn(kind, rows, seconds * factor)


def disturbed(device: Seconds, seed: int, *, wrong: bool) -> Disturbed:
    """Nothing known, or a table that is wrong by 4 times at one width of each kind."""
    rng, table = random.Random(seed), dict[CallKind, LearnedCurve]()
    for kind, true_s in device.items() if wrong else ():
        width = rng.choice(sorted(true_s))
        one = {width: true_s[width] * rng.choice((4.0, 0.25))}
        table[kind] = LearnedCurve({**true_s, **one}, PRIOR)
    return Disturbed(rng, table)


@dataclass(frozen=True)
class Burst:
    """What one came to."""

    forwards: Counter[str]
    took_s: float
    mean_s: float


def known(device: Seconds) -> Costs:
    return Costs({kind: Curve(true_s) for kind, true_s in device.items()})


def play(
    device: Seconds,
    policy: Policy,
    beliefs: Costs | None = None,
    *,
    bursts: int = 1,
    clients: int = CLIENTS,
    apart_s: float = 0.0,
    steps: Sequence[int] = EQUAL,
) -> list[Burst]:
    """Bursts, each when the one before is done long since, of requests that come one by one."""
    gap_s = 2.5 * clients * _alone_s(_stages(device, max(steps)))
    rides = []
    for n in range(clients * bursts):
        own = steps[n % len(steps)]
        stages = _stages(device, own)
        at_s, alone_s = n // clients * gap_s + n % clients * apart_s, _alone_s(stages)
        alike: dict[str, Any] = {"signature": {"steps": own}, "wave": own}
        rides.append(
            SimulatedRequest(QueuedRequest(n + 1, at_s, alone_s, alone_s, **alike), stages)
        )
    worker = Worker(policy, known(device), WIDEST, 0.0003, None, beliefs, is_traced=True)
    done = simulate(iter(rides), [worker])
    found = []
    for number in range(bursts):
        first, last = clients * number, clients * (number + 1)
        ends = [ride.ended_s - number * gap_s for ride in done.requests[first:last]]
        phases = Counter(phase for phase, names in done.batches if first < names[0] <= last)
        found.append(Burst(phases, max(ends), sum(ends) / clients))
    return found


def _stages(device: Seconds, steps: int) -> tuple[Stage, ...]:
    calls = steps * CALLS.get(id(device), 1)
    return tuple(
        Stage(kind, PHASES[kind], kind, true_s[1], count=calls if kind == DENOISE else 1)
        for kind, true_s in device.items()
    )


def _alone_s(stages: Sequence[Stage]) -> float:
    return sum(stage.call_s * stage.count for stage in stages)


def others(
    device: Seconds, clients: int = CLIENTS, apart_s: float = 0.0, steps: Sequence[int] = EQUAL
) -> list[Burst]:
    modes: tuple[Policy, ...] = (Dynamic(8, 0.005), Waves(8, 0.020), Off())
    return [
        one
        for mode in modes
        for one in play(device, mode, clients=clients, apart_s=apart_s, steps=steps)
    ]


@pytest.mark.parametrize(
    "device", [pytest.param(SHAPES, id="shapes"), pytest.param(QWEN, id="qwen-image")]
)
def test_with_known_costs_a_burst_takes_the_forwards_of_dynamic(device: Seconds) -> None:
    [theirs] = play(device, Dynamic(8, 0.005))

    for ours in play(device, Continuous(known(device)), bursts=2):
        assert ours.forwards == theirs.forwards


@pytest.mark.parametrize(
    ("device", "clients"),
    [
        *(pytest.param(SHAPES, n, id=f"shapes, {n}") for n in (8, 12, 16, 24, 33)),
        *(pytest.param(FLUX, n, id=f"flux, {n}") for n in (16, 24, 33)),
        *(pytest.param(QWEN, n, id=f"qwen-image, {n}") for n in (8, 12, 16, 24, 33)),
    ],
)
def test_with_known_costs_a_burst_keeps_both_promises(device: Seconds, clients: int) -> None:
    """Widths of the least mean were 1.09 times slower on flux: 2 rows, or 7 and 1 elsewhere."""
    theirs = others(device, clients)

    for ours in play(device, Continuous(known(device)), bursts=2, clients=clients):
        assert ours.took_s <= min(one.took_s for one in theirs) / 0.97
        assert ours.mean_s <= 1.05 * min(one.mean_s for one in theirs)


@pytest.mark.parametrize(
    ("steps", "clients"), [(MIXED, 12), (MIXED, 16), ((10, 12, 14, 16), 8), ((10, 12, 14, 16), 12)]
)
def test_with_known_costs_a_burst_of_mixed_steps_keeps_both_promises_where_rows_gain_little(
    steps: Sequence[int], clients: int
) -> None:
    """Wider forwards end the burst as soon, and have a mean of up to 1.09 times the others'."""
    theirs = others(FLUX_ON_EPYC, clients, steps=steps)

    for ours in play(
        FLUX_ON_EPYC, Continuous(known(FLUX_ON_EPYC)), bursts=2, clients=clients, steps=steps
    ):
        assert ours.took_s <= min(one.took_s for one in theirs) / 0.97
        assert ours.mean_s <= 1.05 * min(one.mean_s for one in theirs)


@pytest.mark.parametrize("apart_s", [0.0003, 0.001, 0.002])
@on_every_device
def test_a_burst_that_comes_within_some_milliseconds_keeps_both_promises(
    device: Seconds, apart_s: float
) -> None:
    """The last of it finds no room, and is encoded as soon as there is some, before decodes."""
    theirs = others(device, apart_s=apart_s)
    [ours] = play(device, Continuous(known(device)), apart_s=apart_s)

    assert ours.took_s <= min(one.took_s for one in theirs) / 0.97
    assert ours.mean_s <= 1.05 * min(one.mean_s for one in theirs)


@pytest.mark.parametrize("wrong", [False, True], ids=["fresh table", "wrong table"])
@pytest.mark.parametrize(
    "device", [pytest.param(SHAPES, id="shapes"), pytest.param(QWEN, id="qwen-image")]
)
def test_costs_learned_beside_neighbours_keep_both_promises_after_the_first_burst(
    device: Seconds, wrong: bool
) -> None:
    theirs, seeds = others(device), range(5)
    played = [(costs := disturbed(device, n, wrong=wrong), Continuous(costs)) for n in seeds]
    found = [play(device, policy, costs, bursts=6)[1:] for costs, policy in played]
    bursts = [one for several in found for one in several]

    took_s = [one.took_s for one in bursts]
    assert min(one.took_s for one in theirs) >= max(0.97 * median(took_s), 0.95 * fmean(took_s))
    assert median(one.mean_s for one in bursts) <= 1.05 * min(one.mean_s for one in theirs)
    few = theirs[0].forwards  # of `dynamic`
    assert median(one.forwards["denoise"] for one in bursts) <= few["denoise"]
    assert median(one.forwards["encode"] for one in bursts) <= few["encode"]
    assert median(one.forwards["decode"] for one in bursts) <= few["decode"]
    for costs, _ in played:
        assert costs.trials.lost_s <= SHARE * costs.trials.device_s


@pytest.mark.parametrize("is_learned", [False, True], ids=["known", "learned"])
@on_every_device
def test_of_mixed_steps_bursts_that_wait_for_each_other_keep_both_promises(
    device: Seconds, is_learned: bool
) -> None:
    """With others expected to fill the last rounds, the mean was up to 1.12 times on flux.

    Where rows gain little, widths that are near ties are told apart late beside neighbours.
    """
    theirs, throughput = others(device, steps=MIXED), 0.94 if is_learned else 0.97
    bursts = []
    for seed in range(5 if is_learned else 1):
        costs = disturbed(device, seed, wrong=False) if is_learned else None
        policy = Continuous(costs or known(device))
        bursts += play(device, policy, costs, bursts=6, steps=MIXED)[1:]

    assert median(one.took_s for one in bursts) <= min(one.took_s for one in theirs) / throughput
    assert median(one.mean_s for one in bursts) <= 1.05 * min(one.mean_s for one in theirs)


def test_in_a_burst_trials_cost_no_more_than_their_share_from_the_first_forward() -> None:
    """By what the burst ends later, not by what a single forward takes more."""
    tried = 0
    for seed in range(8):
        costs = disturbed(FLUX, seed, wrong=bool(seed % 2))
        play(FLUX, Continuous(costs), costs, bursts=3)

        tried += costs.trials.count
        assert costs.trials.lost_s <= SHARE * costs.trials.device_s
    assert tried  # or the test says nothing


def test_who_is_left_out_of_a_trial_takes_a_round_of_its_own() -> None:
    seconds = [1.0, 1.2, 1.4, 1.6]

    assert trial_s(seconds, best=4, tried=3) == pytest.approx(1.4 + 1.0 - 1.6)
    assert trial_s(seconds, best=2, tried=3) == pytest.approx(1.4 + 1.0 - 2 * 1.2)
    assert trial_s(seconds, best=2, tried=4) == pytest.approx(1.6 - 2 * 1.2)


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12), st.integers(1, 70))
def test_no_fixed_width_is_nearer_to_both_the_soonest_end_and_the_least_mean(
    steps_s: list[float], more: int
) -> None:
    seconds = [sum(steps_s[: n + 1]) for n in range(len(steps_s))]
    calls = len(seconds) + more - 1
    chosen = best_width(seconds, calls)

    def ends(width: int) -> list[float]:
        full, left = divmod(calls, width)
        rounds = [width] * full + [left] * bool(left)
        return [
            sum(seconds[n - 1] for n in rounds[: place + 1])
            for place, size in enumerate(rounds)
            for _ in range(size)
        ]

    soonest_s = min(max(ends(n)) for n in range(1, len(seconds) + 1))
    fixed = [sum(ends(n)) / calls for n in (1, len(seconds))]

    def missed(width: int) -> float:
        return max(max(ends(width)) / soonest_s, sum(ends(width)) / calls / (1.04 * min(fixed)))

    assert missed(chosen) == pytest.approx(min(missed(n + 1) for n in range(len(seconds))))


def test_a_burst_is_of_requests_that_came_at_once_however_the_machine_is() -> None:
    """The work that is predicted moves with the machine's speed, and is another for who waits."""
    one = ParkedCall(1, 1, "key", whole_s=1.0, left_s=1.0, steps=12)
    slow, late = replace(one, whole_s=2.0, left_s=0.3), replace(one, arrived_s=0.2)

    assert are_equal([one, slow])
    assert not are_equal([one, replace(one, steps=13)])
    assert came_at_once([one, late], round_s=0.3)
    assert not came_at_once([one, late], round_s=0.1)


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(0, 50),
)
def test_no_fixed_width_is_nearer_to_both_for_requests_of_mixed_steps_played_step_by_step(
    steps_s: list[float], left: list[int], waited: int
) -> None:
    seconds = [sum(steps_s[: n + 1]) for n in range(len(steps_s))]

    def ends(width: int) -> tuple[float, float]:
        line, running, done_s = list(left), list[int](), list[float]()
        now_s = waited * seconds[0]
        while line or running:
            while line and len(running) < width:
                running.append(line.pop(0))
            now_s += seconds[len(running) - 1]
            done_s += [now_s for steps in running if steps == 1]
            running = [steps - 1 for steps in running if steps > 1]
        return now_s, fmean(done_s)

    found = [ends(n + 1) for n in range(len(seconds))]
    soonest_s, least_s = (min(one[at] for one in found) for at in (0, 1))
    missed = [max(end_s / soonest_s, mean_s / (SLOWER_MIXED * least_s)) for end_s, mean_s in found]
    left_s = [steps * seconds[0] for steps in left]
    chosen = best_width_of_mixed(seconds, left_s, waited * seconds[0])

    assert missed[chosen - 1] == pytest.approx(min(missed))


@example([(0.0, 6), (0.0, 9), (0.0, 14), (0.0, 20)])
@given(
    st.lists(
        st.tuples(st.sampled_from([-0.02, 0.0, 0.5]), st.integers(0, 20)), min_size=1, max_size=12
    )
)
def test_whatever_work_is_predicted_of_a_burst_some_of_it_runs(
    work: list[tuple[float, int]],
) -> None:
    """Steps may be unknown, and a pipeline may call its denoiser once more after the last step."""
    policy = Continuous(known(FLUX))
    calls = [
        ParkedCall(n, n, "key", 1, 8, kind=DENOISE, left_s=left_s, steps=steps)
        for n, (left_s, steps) in enumerate(work, 1)
    ]

    for now_s in (0.0, 1.0):
        assert 1 <= len(policy.choose(calls, 0.0, now_s).calls) <= 8


def test_a_burst_is_of_different_requests_though_they_look_equal_until_they_are_encoded() -> None:
    """In an engine, unlike in the simulator: a pipeline counts its steps later."""
    calls = [
        ParkedCall(10 + n, n, "key", 1, 8, kind=DENOISE, left_s=own * 0.0184, steps=own)
        for n, own in enumerate(MIXED * 4, 1)
    ]
    encodes = [
        replace(one, order=one.request, key="encode", phase="encode", kind=ENCODE, steps=0)
        for one in calls
    ]
    widths = []
    for lines in ([calls], [encodes, calls]):
        policy = Continuous(known({**FLUX, ENCODE: SHAPES[ENCODE]}))
        widths.append([len(policy.choose(line, 0.0, 0.0).calls) for line in lines][-1])

    assert widths[0] == widths[1] > 2  # two rows, where only the mean counted
