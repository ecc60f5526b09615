"""The policy of `continuous`: an example for each rule, a property for each promise."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.starvation import MAX_OVERTAKEN
from carpool.schedule.views import Admission, CallKind, Choice, ParkedCall, QueuedRequest
from carpool_lab.simulate.fleet import simulate
from carpool_lab.simulate.scenario import Labels, Model
from carpool_lab.simulate.simulator import Worker
from carpool_lab.tables import MAX_ROWS, Table
from carpool_lab.workload import Arrival

SMALL, LARGE = CallKind("denoise", 1), CallKind("denoise", 4)
ENCODE, DECODE = CallKind("encode", 1), CallKind("decode", 1)
SIDES = {ENCODE: Curve({1: 0.3, 16: 4.8}), DECODE: Curve({1: 0.3, 16: 4.8})}
SLOW = Costs({SMALL: Curve({1: 1.0, 16: 16.0}), LARGE: Curve({1: 4.0, 16: 64.0}), **SIDES})
FREE = Costs({SMALL: Curve({1: 1.0, 16: 1.0}), LARGE: Curve({1: 4.0, 16: 4.0}), **SIDES})


def step(
    order: int, request: int, kind: CallKind = SMALL, left: int = 4, **more: Any
) -> ParkedCall:
    """A parked denoising call with so many steps left of four."""
    one_s = SLOW.seconds(kind, 1)
    call = ParkedCall(order, request, kind, 1, 16, "denoise", kind, 0.0, left * one_s, 4 * one_s)
    return replace(call, **more)


def chosen(policy: Continuous, *parked: ParkedCall, now_s: float = 0.0) -> list[int]:
    return [call.request for call in policy.choose(parked, 0.0, now_s).calls]


CALLS = st.builds(
    lambda request, phase, size, rows, left, arrived_s, deadline_s, priority, tenant: ParkedCall(
        order=0,
        request=request,
        key=(phase, size),
        rows=rows,
        max_rows=8,
        phase=phase,
        kind={"encode": ENCODE, "decode": DECODE, "denoise": size}[phase],
        arrived_s=arrived_s,
        left_s=left,
        whole_s=10.0,
        deadline_s=deadline_s,
        priority=priority,
        tenant=tenant,
    ),
    st.integers(1, 99),
    st.sampled_from(["encode", "denoise", "denoise", "decode"]),
    st.sampled_from([SMALL, LARGE]),
    st.integers(1, 9),
    st.floats(0.1, 10),
    st.integers(0, 20).map(float),
    st.sampled_from([inf, inf, 5.0, 30.0]),
    st.integers(-10, 10),
    st.sampled_from("ab"),
)
PARKED = st.lists(CALLS, min_size=1, max_size=12, unique_by=lambda call: call.request).map(
    lambda calls: [replace(call, order=order) for order, call in enumerate(calls, 1)]
)
COSTS = st.sampled_from([SLOW, FREE, Costs()])
SHARES = st.sampled_from([None, {"a": 2.0}])


@given(PARKED, COSTS, SHARES, st.floats(0, 100))
def test_whenever_anybody_is_parked_somebody_runs_of_one_key_and_within_the_cap(
    parked: list[ParkedCall], costs: Costs, shares: dict[str, float] | None, waiting_s: float
) -> None:
    choice = Continuous(costs, fair_share=shares).choose(parked, waiting_s, 20.0)

    assert choice.calls
    assert set(choice.calls) <= set(parked)
    assert len(set(choice.calls)) == len(choice.calls)
    assert len({call.key for call in choice.calls}) == 1
    assert len(choice.calls) == 1 or sum(call.rows for call in choice.calls) <= 8


@given(PARKED, COSTS, SHARES, st.randoms(use_true_random=False))
def test_the_order_in_which_calls_are_listed_changes_nothing(
    parked: list[ParkedCall], costs: Costs, shares: dict[str, float] | None, rng: random.Random
) -> None:
    shuffled = rng.sample(parked, len(parked))
    one, other = (Continuous(costs, fair_share=shares) for _ in range(2))

    for now_s in (20.0, 21.0, 22.0):  # what it remembers does not depend on it either
        assert one.choose(parked, 3.0, now_s) == other.choose(shuffled, 3.0, now_s)


def test_nobody_parked_is_no_forward() -> None:
    assert Continuous(SLOW).choose([], 0.0, 0.0) == Choice(())


# Who leads


def test_the_shorter_request_leads_unless_the_longer_came_long_before() -> None:
    long = step(1, 1)

    assert chosen(Continuous(SLOW), long, step(2, 2, left=1, arrived_s=0.5)) == [2]
    assert chosen(Continuous(SLOW), long, step(2, 2, left=1, arrived_s=2.0)) == [1]


def test_of_two_sizes_the_one_whose_requests_end_at_the_higher_rate_leads() -> None:
    large, small = step(1, 1, LARGE), [step(n, n, arrived_s=1.0) for n in (2, 3)]

    assert chosen(Continuous(FREE), large, *small) == [2, 3]
    assert chosen(Continuous(FREE), large, *(replace(c, arrived_s=90.0) for c in small)) == [1]


def test_who_began_together_goes_on_and_nobody_of_much_work_comes_between() -> None:
    policy = Continuous(SLOW)
    assert chosen(policy, step(1, 1, LARGE)) == [1]
    begun = step(2, 1, LARGE, left=3)

    assert chosen(policy, begun, step(3, 2, LARGE, left=2, arrived_s=-9.0)) == [1]
    assert chosen(policy, begun, step(3, 2, left=4, arrived_s=-9.0)) == [2]


def test_who_began_together_but_needs_another_expert_by_now_has_a_forward_of_its_own() -> None:
    policy = Continuous(FREE)
    assert chosen(policy, step(1, 1), step(2, 2)) == [1, 2]
    same, another = step(3, 1, left=3), step(4, 2, left=3, key="the second expert")

    assert chosen(policy, same, another) == [1]
    assert chosen(policy, another) == [2]


def test_who_makes_a_forward_much_slower_does_not_join_it_while_another_size_waits() -> None:
    some = Costs({SMALL: Curve({1: 1.0, 2: 1.7}), LARGE: Curve({1: 4.0})})
    others = [step(n, n, arrived_s=3.0 * n) for n in range(2, 9)]

    def joined(*waiting: ParkedCall) -> list[int]:
        policy = Continuous(some)
        policy.choose([step(1, 1)], 0.0, 0.0)
        return chosen(policy, step(10, 1, left=3), *waiting)

    assert len(joined(*others)) > 1
    assert joined(*others, step(20, 20, LARGE, arrived_s=9.0)) == [1]


def test_a_deadline_that_presses_goes_first_the_one_with_the_least_slack_before_others() -> None:
    short = step(1, 1, left=1)
    soon, sooner = step(2, 2, LARGE, deadline_s=30.0), step(3, 3, LARGE, deadline_s=25.0)
    far = step(2, 2, LARGE, deadline_s=300.0)

    assert chosen(Continuous(SLOW), short, far) == [1]
    assert chosen(Continuous(SLOW), short, soon) == [2]
    assert chosen(Continuous(SLOW), short, soon, sooner) == [3]


def test_a_deadline_that_can_no_longer_be_met_does_not_press() -> None:
    late = step(2, 2, LARGE, deadline_s=15.0)  # and needs 16

    assert chosen(Continuous(SLOW), step(1, 1, left=1), late) == [1]


def test_on_a_busy_machine_a_deadline_presses_sooner() -> None:
    class Busy(Costs):
        slowdown = 2.0  # what is left takes so many times as long just now

    busy, short = Busy(dict(SLOW)), step(1, 1, left=1)
    soon, too_soon = step(2, 2, LARGE, deadline_s=60.0), step(2, 2, LARGE, deadline_s=30.0)

    assert chosen(Continuous(SLOW), short, soon) == [1]
    assert chosen(Continuous(busy), short, soon) == [2]
    assert chosen(Continuous(busy), short, too_soon) == [1]  # it needs 32 s by now


def test_priority_is_worth_a_multiple_of_the_requests_own_work() -> None:
    early, late = step(1, 1), step(2, 2, arrived_s=12.0)

    assert chosen(Continuous(SLOW), early, late) == [1]
    assert chosen(Continuous(SLOW), early, replace(late, priority=3)) == [2]
    assert chosen(Continuous(SLOW), replace(early, priority=-3), late) == [2]


# How wide


def test_calls_ride_together_where_rows_are_free_and_not_where_they_gain_nothing() -> None:
    calls = [step(n, n) for n in range(1, 6)]

    assert chosen(Continuous(FREE), *calls) == [1, 2, 3, 4, 5]
    assert chosen(Continuous(SLOW), *calls) == [1]


def test_a_choice_says_why_it_is_not_wider() -> None:
    calls = [step(n, n) for n in range(1, 6)]
    measured = Costs({SMALL: Curve({1: 1.0, 2: 1.0})})

    def why(costs: Costs, *parked: ParkedCall) -> str:
        return Continuous(costs).choose(parked, 0.0, 0.0).why

    assert why(FREE, *calls) == "nobody"
    assert why(FREE, *(replace(call, max_rows=3) for call in calls)) == "cap"
    assert why(SLOW, *calls) == "knee"
    assert (
        why(measured, *(replace(call, arrived_s=9.0 * call.order) for call in calls)) == "untried"
    )
    assert why(measured, *calls) == "nobody"  # a burst is as wide as may be at once
    assert why(FREE, replace(calls[0], key=("f", "w")), replace(calls[1], key=("f", "v"))) == (
        "nobody"
    )


def test_a_long_line_makes_even_a_small_gain_worth_it() -> None:
    costs = Costs({SMALL: Curve({1: 1.0, 2: 1.96})})
    pair = [step(1, 1), step(2, 2)]

    alone = Continuous(costs).choose(pair, 0.0, 0.0)
    together = Continuous(costs).choose(pair, 4000.0, 0.0)

    assert (len(alone.calls), len(together.calls)) == (1, 2)


# Who comes aboard


def test_whoever_there_is_a_place_for_comes_aboard_the_first_in_line_first() -> None:
    line = [QueuedRequest(n, whole_s=1.0) for n in range(1, 6)]

    assert Continuous(SLOW, max_running=4).admit(line, 1, 0.0) == Admission((1, 2, 3))
    assert Continuous(SLOW, max_running=4).admit(line, 4, 0.0) == Admission(())
    assert Continuous(SLOW).admit([], 0, 0.0) == Admission(())


def test_priority_and_a_pressing_deadline_pass_others_in_line() -> None:
    plain = QueuedRequest(1, left_s=4.0, whole_s=4.0)
    important = replace(plain, request=2, priority=1)
    pressing = replace(plain, request=3, deadline_s=5.0)

    admitted = Continuous(SLOW, max_running=2).admit([plain, important, pressing], 0, 0.0)

    assert admitted.requests == (3, 2)


# Over time


@dataclass(slots=True)
class Watched(Continuous):
    """The policy itself; keeps what it was asked and what it chose."""

    turns: list[tuple[Sequence[ParkedCall], Choice]] = field(default_factory=list)

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        choice = Continuous.choose(self, parked, waiting_s, now_s)
        if choice.calls:
            self.turns.append((parked, choice))
        return choice


def model_of(small: Mapping[int, float], large: Mapping[int, float]) -> Model:
    return Model([Table("m-512", 4, small, 0.4, 0.4), Table("m-1024", 4, large, 0.4, 0.4)])


MODEL = {
    "slow": model_of({1: 1.0, 16: 16.0}, {1: 4.0, 16: 64.0}),
    "free": model_of({1: 1.0, 16: 1.0}, {1: 4.0, 16: 4.0}),
    "some": model_of({1: 1.0, 4: 2.0, 16: 7.0}, {1: 4.0, 16: 60.0}),
}
ASKED = st.lists(
    st.builds(
        lambda gap_s, size, steps: (gap_s, {"size": size, "num_inference_steps": steps}),
        st.sampled_from([0.0, 0.5, 3.0, 9.0]),
        st.sampled_from(["512x512", "1024x1024"]),
        st.sampled_from([1, 3, 30]),
    ),
    min_size=2,
    max_size=30,
)


def watch(model: Model, asked: Iterable[tuple[float, dict[str, object]]]) -> Watched:
    """Let requests come, each so many seconds after the one before."""
    policy = Watched(model.costs)
    worker = Worker(policy, model.costs, MAX_ROWS)
    times_s = itertools.accumulate(gap_s for gap_s, _ in asked)
    arrivals = [Arrival(at_s, body) for at_s, (_, body) in zip(times_s, asked, strict=True)]
    simulate(model.requests(arrivals, Labels()), [worker])
    return policy


@given(ASKED, st.sampled_from(sorted(MODEL)))
def test_nobody_is_passed_over_by_more_than_a_bounded_number_of_later_requests(
    asked: list[tuple[float, dict[str, object]]], model: str
) -> None:
    policy = watch(MODEL[model], asked)

    passed = Counter[int]()
    for parked, choice in policy.turns:
        leader = choice.calls[0]
        passed.update(
            call.order
            for call in parked
            if call.request < leader.request and call not in choice.calls
        )
    assert max(passed.values(), default=0) <= MAX_OVERTAKEN + policy.max_running


def test_short_requests_that_keep_coming_do_not_starve_a_long_one() -> None:
    long = {"size": "1024x1024", "num_inference_steps": 50}
    short = {"size": "512x512", "num_inference_steps": 1, "priority": 10}

    policy = watch(MODEL["slow"], [(0.0, long), *[(1.0, short)] * 400])

    last = max(n for n, (_, choice) in enumerate(policy.turns) if choice.calls[0].request == 1)
    waits, longest = 0, 0
    for _, choice in policy.turns[:last]:
        waits = 0 if choice.calls[0].request == 1 else waits + 1
        longest = max(longest, waits)
    assert longest <= MAX_OVERTAKEN + policy.max_running


@given(ASKED, st.sampled_from(sorted(MODEL)))
def test_between_two_forwards_of_who_began_together_is_one_other_or_the_time_of_one(
    asked: list[tuple[float, dict[str, object]]], model: str
) -> None:
    policy = watch(MODEL[model], asked)

    costs, began, sides = MODEL[model].costs, set[int](), list[float]()
    for parked, choice in policy.turns:
        leader, chosen = choice.calls[0], {call.request for call in choice.calls}
        denoising = [call for call in parked if call.phase == "denoise"]
        if leader.phase == "denoise":
            began = began if began & chosen else chosen
            sides = []
        elif any(call.request in began for call in denoising):
            sides.append(costs.seconds(leader.kind, len(choice.calls)))
            one_s = max(costs.seconds(call.kind, 1) for call in denoising)
            assert len(sides) == 1 or sum(sides) <= one_s + 1e-9


def test_where_sizes_take_turns_all_encode_and_decode_before_the_next_begin_together() -> None:
    policy = Continuous(SLOW)
    decodes = [step(n, n, phase="decode") for n in (12, 13)]
    encode, waits = step(14, 14, phase="encode"), step(15, 15, LARGE)
    assert chosen(policy, step(1, 1)) == [1]

    assert chosen(policy, *decodes, step(2, 2)) == [12]
    assert chosen(policy, decodes[1], step(2, 2)) == [2]  # only this size so far
    assert chosen(policy, step(3, 3, LARGE)) == [3]

    assert chosen(policy, *decodes, encode, waits) == [12]
    assert chosen(policy, decodes[1], encode, waits) == [13]
    assert chosen(policy, encode, waits) == [14]
    assert chosen(policy, waits) == [15]


def encode_of(order: int, request: int, left: int = 4) -> ParkedCall:
    """An encode of a request that has so many steps to go."""
    return replace(step(order, request, left=left), key=ENCODE, kind=ENCODE, phase="encode")


def test_who_would_share_the_next_forward_is_encoded_before_it() -> None:
    policy = Continuous(FREE)
    assert chosen(policy, step(1, 1)) == [1]
    running, newcomer = step(2, 1, left=3), encode_of(3, 2)

    assert chosen(policy, running, newcomer) == [2]

    full = [replace(newcomer, order=n, request=n, max_rows=3) for n in (3, 4, 5)]
    assert chosen(policy, running, *full)[0] == 3  # a full forward of encodes


def test_who_goes_before_all_who_run_is_encoded_whether_there_is_room_or_not() -> None:
    policy = Continuous(SLOW)
    assert chosen(policy, step(1, 1)) == [1]

    assert chosen(policy, step(2, 1, left=3), encode_of(3, 2, left=1)) == [2]


def test_requests_that_have_not_begun_wait_for_encodes_and_not_for_a_text_that_is_written() -> None:
    policy, ready, begun = Continuous(FREE), step(1, 1), step(1, 1, left=3)
    encodes = [encode_of(n, n) for n in range(2, 5)]
    turns = [chosen(policy, ready, replace(call, max_rows=1)) for call in encodes]
    assert turns == [[2], [3], [4]]
    assert chosen(policy, begun, encode_of(5, 5)) == [1]

    tokens = [replace(encode_of(n, 6), is_token=True) for n in range(6, 20)]
    assert [1] in [chosen(policy, ready, token) for token in tokens]


def test_a_text_that_has_begun_does_not_wait_again_for_each_token() -> None:
    policy, full = Continuous(SLOW), dict[str, Any](max_rows=1)
    assert chosen(policy, step(1, 1, **full), step(2, 2, **full)) == [1]
    running = step(3, 1, left=3, **full), step(2, 2, **full)
    prompt, token = encode_of(4, 3), replace(encode_of(5, 4), is_token=True)

    assert chosen(policy, *running, prompt) == [1]  # it waits, for there is no room
    assert chosen(policy, *running, prompt, token) == [4]
    later = [replace(token, order=order) for order in range(6, 40)]
    turns = [chosen(policy, *running, prompt, token) for token in later]
    assert [4] in turns
    assert [1] in turns  # tokens take no longer than the steps between them


def test_texts_that_come_together_are_begun_between_tokens_of_those_that_were_begun() -> None:
    policy = Continuous(FREE)
    prompts = [replace(encode_of(n, n), key=f"prompt {n}") for n in (1, 2, 3)]
    token = [replace(encode_of(n + 10, n), is_token=True) for n in (1, 2)]
    assert chosen(policy, *prompts) == [1]
    assert [chosen(policy, token[0], *prompts[1:]) for _ in range(2)] == [[1], [2]]
    assert 3 not in chosen(policy, *token[:2], prompts[2])
    assert chosen(policy, *token[:2], prompts[2]) == [3]


@pytest.mark.parametrize("busy", [1.0, 2.0])
def test_who_comes_after_one_ran_alone_for_long_is_encoded_and_found_to_share(busy: float) -> None:
    """Of two together nothing was ever learned: who is to be encoded waits for it, too.

    The machine may have become busy meanwhile.
    """
    true, noise, steps = Curve({1: 1.0, 2: 1.2}), random.Random(0), 200
    costs = Costs(SIDES)
    policy, now_s, widths = Continuous(costs), 0.0, list[int]()
    newcomer: ParkedCall | None = None
    for turn in range(60):
        if turn == 40:
            newcomer = replace(encode_of(1000, 2, left=steps), arrived_s=now_s)
        parked = [step(turn + 1, 1, left=steps - turn, whole_s=1.0 * steps)]
        if newcomer is not None:
            parked.append(newcomer)
        choice = policy.choose(parked, 0.0, now_s)
        if choice.calls[0].phase == "encode":
            newcomer = step(1001, 2, left=steps, whole_s=1.0 * steps, arrived_s=now_s)
            continue
        widths.append(len(choice.calls))
        took_s = true.seconds(widths[-1]) * noise.lognormvariate(0.0, 0.1)
        took_s *= busy if turn >= 30 else 1.0
        costs.learn(SMALL, widths[-1], took_s)
        now_s += took_s

    assert widths[:40] == [1] * 40
    assert sum(width == 2 for width in widths[40:]) >= 15


@given(ASKED)
def test_where_rows_are_free_a_newcomer_rides_after_two_denoising_forwards_of_its_size(
    asked: list[tuple[float, dict[str, object]]],
) -> None:
    only = [(gap_s, {**body, "size": "512x512"}) for gap_s, body in asked[: MAX_ROWS["denoise"]]]

    policy = watch(MODEL["free"], only)

    missed = Counter[int]()
    for parked, choice in policy.turns:
        if choice.calls[0].phase == "denoise":
            missed.update(
                c.request for c in parked if c.phase == "denoise" and c not in choice.calls
            )
    assert not missed


def always_full(
    policy: Continuous, lines: dict[tuple[str, CallKind], int], turns: int
) -> list[Choice]:
    """Choose again and again; a request that has made its four steps is followed by another."""
    numbers, orders = itertools.count(1), itertools.count(1)

    def newcomer(tenant: str, kind: CallKind, now_s: float) -> ParkedCall:
        return step(next(orders), next(numbers), kind, tenant=tenant, arrived_s=now_s)

    parked = [newcomer(*line, 0.0) for line, size in lines.items() for _ in range(size)]
    now_s, choices = 0.0, []
    for _ in range(turns):
        choice = policy.choose(parked, 0.0, now_s)
        choices.append(choice)
        now_s += policy.costs.seconds(choice.calls[0].kind, len(choice.calls))
        for call in choice.calls:
            parked.remove(call)
            left_s = call.left_s - call.whole_s / 4
            if left_s > 0:
                parked.append(replace(call, order=next(orders), left_s=left_s))
            else:
                parked.append(newcomer(call.tenant, call.kind, now_s))
    return choices


@pytest.mark.parametrize("costs", [SLOW, FREE])
def test_sizes_take_turns_and_neither_starves(costs: Costs) -> None:
    choices = always_full(Continuous(costs), {("", SMALL): 4, ("", LARGE): 4}, turns=600)

    sizes = [choice.calls[0].kind for choice in choices]
    longest = max(len(list(same)) for _, same in itertools.groupby(sizes))
    assert longest <= MAX_OVERTAKEN + 8
    assert len(set(sizes)) == 2
