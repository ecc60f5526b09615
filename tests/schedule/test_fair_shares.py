"""Fair shares: a tenant's depends on its weight, never on how many users it names."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.fair_shares import FairShares
from carpool.schedule.views import CallKind, Choice, ParkedCall, QueuedRequest
from carpool.types import Phase
from carpool_lab.simulate.fleet import simulate
from carpool_lab.simulate.simulator import SimulatedRequest, Stage, Worker
from support.engine_driver import VirtualClock, driving

SMALL, LARGE = CallKind("denoise", 1), CallKind("denoise", 4)
SLOW = Costs({SMALL: Curve({1: 1.0, 16: 16.0}), LARGE: Curve({1: 4.0, 16: 64.0})})
FREE = Costs({SMALL: Curve({1: 1.0, 16: 1.0}), LARGE: Curve({1: 4.0, 16: 4.0})})

User = Callable[[int], str]
"""The user that a tenant names in its n-th request."""

HABITS: dict[str, User] = {
    "nobody": lambda n: "", "one": lambda n: "u", "ten": lambda n: f"u{n % 10}",
    "another each time": lambda n: f"u{n}", "the other tenant's": lambda n: "b",
}  # fmt: skip


def call(
    number: int, tenant: str, user: str = "", kind: CallKind = SMALL, **more: Any
) -> ParkedCall:
    whole_s = 4 * SLOW.seconds(kind, 1)
    one = ParkedCall(number, number, kind, 1, 16, "denoise", kind, 0.0, whole_s, whole_s)
    return replace(one, tenant=tenant, user=user, **more)


def served(
    policy: Continuous, lines: dict[str, tuple[int, CallKind, User]], turns: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Keep so many requests of each tenant parked; seconds of forwards by tenant and by user.

    Args:
        lines: by tenant its parked requests, their kind and what users they name.
    """
    numbers, of = itertools.count(1), dict.fromkeys(lines, 0)

    def newcomer(tenant: str, now_s: float) -> ParkedCall:
        _, kind, user = lines[tenant]
        of[tenant] += 1
        return call(next(numbers), tenant, user(of[tenant]), kind, arrived_s=now_s)

    first = [newcomer(tenant, 0.0) for tenant, (size, _, _) in lines.items() for _ in range(size)]
    parked = {one.order: one for one in first}
    orders, now_s = itertools.count(10**6), 0.0
    by_tenant, by_user = defaultdict[str, float](float), defaultdict[str, float](float)
    for _ in range(turns):
        choice = policy.choose(list(parked.values()), 0.0, now_s)
        took_s = policy.costs.seconds(choice.calls[0].kind, len(choice.calls))
        now_s += took_s
        for one in choice.calls:
            by_tenant[one.tenant] += took_s / len(choice.calls)
            by_user[one.user] += took_s / len(choice.calls)
            del parked[one.order]
            left_s = one.left_s - one.whole_s / 4
            if left_s > 0:
                then = replace(one, order=next(orders), left_s=left_s)
            else:
                then = newcomer(one.tenant, now_s)
            parked[then.order] = then
    return by_tenant, by_user


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(HABITS)),
    st.sampled_from([SLOW, FREE]),
    st.tuples(st.integers(2, 30), st.integers(2, 30)),
    st.sampled_from([0.2, 1.0, 3.0]),
)
def test_the_share_of_a_tenant_does_not_depend_on_the_users_that_it_names(
    habit: str, costs: Costs, sizes: tuple[int, int], weight: float
) -> None:
    def share(named: User) -> dict[str, float]:
        policy = Continuous(costs, fair_share={"a": weight})
        lines = {"a": (sizes[0], SMALL, named), "b": (sizes[1], LARGE, HABITS["nobody"])}
        return served(policy, lines, turns=200)[0]

    plain, named = share(HABITS["nobody"]), share(HABITS[habit])

    assert named["a"] == pytest.approx(plain["a"], abs=16.0)  # a request of the other
    assert named["b"] == pytest.approx(plain["b"], abs=16.0)


@pytest.mark.parametrize("costs", [SLOW, FREE])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 24), (24, 2), (30, 30)])
@pytest.mark.parametrize("weight", [0.2, 1.0, 3.0])
def test_the_share_of_a_tenant_does_not_depend_on_how_many_requests_it_has_running(
    costs: Costs, sizes: tuple[int, int], weight: float
) -> None:
    policy, nobody = Continuous(costs, fair_share={"a": weight}), HABITS["nobody"]
    lines = {"a": (sizes[0], SMALL, nobody), "b": (sizes[1], LARGE, nobody)}

    by_tenant, _ = served(policy, lines, turns=500)

    assert by_tenant["a"] / by_tenant["b"] == pytest.approx(weight, rel=0.1)


@given(st.lists(st.sampled_from(sorted(HABITS)), min_size=2, max_size=2), st.integers(4, 12))
def test_where_all_calls_cost_the_same_naming_users_changes_no_tenants_turn(
    habits: list[str], size: int
) -> None:
    def turns(habit: str) -> list[str]:
        policy = Continuous(SLOW, fair_share={})
        numbers = itertools.count(1)
        parked = [call(next(numbers), "a", HABITS[habit](n)) for n in range(size)]
        parked += [call(next(numbers), "b") for _ in range(size)]
        told = []
        while parked:
            [one] = policy.choose(parked, 0.0, 0.0).calls
            parked.remove(one)
            told.append(one.tenant)
        return told

    assert turns(habits[0]) == turns(habits[1])


def test_users_of_one_tenant_divide_its_share_equally() -> None:
    policy = Continuous(SLOW, fair_share={})
    greedy: User = lambda n: "greedy" if n <= 9 or n % 5 else "modest"  # noqa: E731
    lines = {"a": (10, SMALL, greedy), "b": (10, SMALL, HABITS["nobody"])}

    policy_users = served(policy, lines, turns=2000)[1]

    assert policy_users["greedy"] + policy_users["modest"] == pytest.approx(1000, rel=0.05)
    assert policy_users["modest"] >= 180  # all that it asks for: a fifth of the requests


def test_a_pressing_deadline_or_priority_of_a_tenant_takes_nothing_of_another_ones_share() -> None:
    def shares(**more: Any) -> Counter[str]:
        policy, numbers = Continuous(SLOW, fair_share={}), itertools.count(1)
        by_tenant, now_s = Counter[str](), 0.0
        for _ in range(200):
            parked = [
                call(next(numbers), "a", deadline_s=now_s + 5.0, **more),
                call(next(numbers), "b", arrived_s=now_s),
            ]
            [one] = policy.choose(parked, 0.0, now_s).calls
            by_tenant[one.tenant] += 1
            now_s += 1.0
        return by_tenant

    assert shares() == {"a": 100, "b": 100}
    assert shares(priority=10) == {"a": 100, "b": 100}


def test_of_one_tenants_requests_the_one_whose_deadline_presses_goes_first() -> None:
    policy = Continuous(SLOW, fair_share={})
    parked = [call(1, "a", "u"), call(2, "a", "v", deadline_s=5.0)]

    assert [one.request for one in policy.choose(parked, 0.0, 0.0).calls] == [2]


@pytest.mark.parametrize("phase", ["encode", "decode"])
@pytest.mark.parametrize("weight", [0.1, 1.0, 10.0])
def test_who_has_much_to_encode_or_decode_gets_no_more_than_its_share(
    phase: Phase, weight: float
) -> None:
    heavy = CallKind(phase, 9)
    costs = Costs({SMALL: Curve({1: 1.0, 16: 16.0}), heavy: Curve({1: 5.0, 16: 80.0})})
    policy, numbers = Continuous(costs, fair_share={"a": weight}), itertools.count(1)
    by_tenant: dict[str, float] = defaultdict(float)
    parked = [call(next(numbers), "b") for _ in range(4)]
    parked += [call(next(numbers), "a", "u", heavy, phase=phase) for _ in range(4)]
    for _ in range(500):
        for one in policy.choose(parked, 0.0, 0.0).calls:
            by_tenant[one.tenant] += costs.seconds(one.kind, 1)
            parked.remove(one)
            parked.append(replace(one, order=(n := next(numbers)), request=n))

    assert by_tenant["a"] / weight - by_tenant["b"] <= 10 * max(1, 1 / weight)


# Coming and going


def turn(shares: FairShares, *tenants: str, seconds: float = 1.0) -> str:
    """Serve the tenant whose turn it is among those with work."""
    named = [one.partition("/") for one in tenants]
    parked = [call(n, tenant, user) for n, (tenant, _, user) in enumerate(named)]
    shares.running(parked)
    first = min(parked, key=lambda one: (*shares.rank(one), one.order))
    shares.charge(first, seconds)
    return f"{first.tenant}/{first.user}" if first.user else first.tenant


def test_a_tenant_that_used_an_idle_device_owes_nothing_for_it() -> None:
    shares = FairShares({})
    for _ in range(1000):
        turn(shares, "a")
    shares.running([])
    turn(shares, "b")  # comes while a is away

    assert Counter(turn(shares, "a", "b") for _ in range(100)) == {"a": 50, "b": 50}


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    shares = FairShares({})
    for _ in range(500):
        turn(shares, "a")

    assert Counter(turn(shares, "a", "b") for _ in range(100)) == {"a": 50, "b": 50}


def test_a_tenant_that_waits_for_admission_keeps_its_turn() -> None:
    shares = FairShares({})
    turn(shares, "a", "b")
    shares.queued([QueuedRequest(9, tenant="b")])
    for _ in range(10):
        turn(shares, "a")
    shares.admitted([QueuedRequest(9, tenant="b")])
    shares.queued([])

    assert [turn(shares, "a", "b") for _ in range(10)] == ["b"] * 10


def test_a_user_invented_for_each_request_gains_on_users_of_its_own_tenant_only() -> None:
    shares = FairShares({})
    invented = [(f"a/{n}", f"a/{n + 1}") for n in range(600)]  # one is new, one is left

    told = Counter(turn(shares, *two, "a/honest", "b/honest") for two in invented)

    assert told["b/honest"] == pytest.approx(300, abs=1)
    assert told["a/honest"] == pytest.approx(100, abs=2)  # as one of three


@given(st.lists(st.sampled_from(["a/1", "a/2", "b/1", "b/2", "c"]), max_size=40), st.data())
def test_nobody_with_work_falls_behind_by_more_than_a_turn_each(
    first: Sequence[str], data: st.DataObject
) -> None:
    shares = FairShares({"a": 2.0, "*": 1.0})
    for one in first:  # any history
        turn(shares, one)
    everybody = ["a/1", "a/2", "b/1", "b/2", "c"]
    before = [turn(shares, *everybody) for _ in range(20)]

    told = Counter(turn(shares, *everybody).split("/")[0] for _ in range(200))

    assert before
    assert told["a"] == pytest.approx(100, abs=2)
    assert told["b"] == pytest.approx(50, abs=2)
    assert told["c"] == pytest.approx(50, abs=2)


def test_what_is_remembered_is_bounded_by_those_who_have_work() -> None:
    shares = FairShares({})
    for n in range(5000):
        turn(shares, f"t{n}", f"a/u{n}", f"a/u{n + 1}")

    assert len(shares._tenants.times_s) < 20
    assert sum(len(level.times_s) for level in shares._users.values()) < 20


# Under load: the simulator asks who is admitted, too


def played(user: User, costs: Costs, *, seed: int, weight: float = 1.0) -> dict[str, float]:
    """Seconds that two tenants were served while both had requests queued."""
    rng = random.Random(seed)
    rides, at_s = [], 0.0
    for number in range(1, 401):
        at_s += rng.expovariate(2.0)
        tenant = "a" if rng.random() < 0.7 else "b"
        kind = rng.choice([SMALL, LARGE])
        stage = Stage(kind, "denoise", kind, SLOW.seconds(kind, 1), count=rng.choice([1, 4, 9]))
        solo_s = stage.call_s * stage.count
        name = user(number) if tenant == "a" else "b"
        waiting = QueuedRequest(number, at_s, solo_s, solo_s, inf, 0, tenant, name)
        rides.append(SimulatedRequest(waiting, (stage,)))
    policy = Continuous(costs, max_running=6, fair_share={"a": weight})
    worker = Worker(policy, costs, {"denoise": 4, "encode": 4, "decode": 4})
    result = simulate(rides, [worker])
    both_s = min(
        max(ride.ended_s for ride in result.requests if ride.waiting.tenant == tenant)
        for tenant in "ab"
    )
    done: dict[str, float] = defaultdict(float)
    for ride in result.requests:
        done[ride.waiting.tenant] += ride.solo_s if ride.ended_s <= both_s else 0.0
    return done


@pytest.mark.parametrize("habit", sorted(HABITS))
def test_under_load_two_tenants_get_the_same_whatever_users_one_of_them_names(habit: str) -> None:
    plain, named = (played(HABITS[one], SLOW, seed=1) for one in ("nobody", habit))

    assert named["a"] / named["b"] == pytest.approx(1.0, rel=0.15)
    assert named["b"] == pytest.approx(plain["b"], rel=0.05)


# In the engine


def test_the_engine_divides_its_forwards_between_tenants_whatever_users_they_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"num_inference_steps": 9, "width": 16, "height": 16, "max_sequence_length": 16}
    chosen: list[ParkedCall] = []
    choose = Continuous.choose

    def watched(policy: Continuous, *asked: Any) -> Choice:
        choice = choose(policy, *asked)
        chosen.extend(call for call in choice.calls if call.phase == "denoise")
        return choice

    monkeypatch.setattr(Continuous, "choose", watched)
    shares: dict[str, Any] = {"fair_share": ("*=1",), "max_batch_size": 1}
    with driving("flux", mode="continuous", clock=VirtualClock(0.001), **shares) as drive:
        for n in range(6):
            drive.submit(**small, tenant="a", user=f"u{n}")
        for _ in range(2):
            drive.submit(**small, tenant="b")
        drive.turn_until(lambda: len(chosen) >= 34)  # b's requests make 18

    served = Counter(call.tenant for call in chosen)
    assert served["b"] == pytest.approx(17, abs=3)
    assert len({call.user for call in chosen if call.tenant == "a"}) > 1
