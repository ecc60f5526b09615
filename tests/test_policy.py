"""Policies: one example for each rule, one property for each promise."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.schedule.policy import POLICIES, Policy, continuous, off
from carpool.types import Parked

CAPS = {"a": 4, "b": 8, "c": 1}


def lines(max_calls: int = 12) -> st.SearchStrategy[list[Parked]]:
    """Parked calls of different requests, in any order; the cap belongs to the key."""
    call = st.tuples(st.sampled_from(sorted(CAPS)), st.integers(1, 6), st.integers(0, 50))

    def build(calls: list[tuple[str, int, int]]) -> list[Parked]:
        return [
            Parked(order=order, request=i, key=key, rows=rows, max_rows=CAPS[key])
            for i, (key, rows, order) in enumerate(calls)
        ]

    return st.lists(call, max_size=max_calls, unique_by=lambda call: call[2]).map(build)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]


def waiting(order: int, *, request: int = 0, key: str = "a", rows: int = 1, cap: int = 4) -> Parked:
    return Parked(order=order, request=request or order, key=key, rows=rows, max_rows=cap)


def orders(chosen: Sequence[Parked]) -> list[int]:
    return [call.order for call in chosen]


def test_nothing_parked_is_nothing_chosen(policy: Policy) -> None:
    assert policy([]) == []


def test_off_runs_the_request_that_was_admitted_first() -> None:
    early = waiting(9, request=1)
    late = waiting(2, request=5)

    assert off([late, early]) == [early]


def test_continuous_runs_the_call_that_waits_longest() -> None:
    early = waiting(9, request=1)
    late = waiting(2, request=5, key="b")

    assert continuous([early, late]) == [late]


def test_calls_of_the_same_key_join() -> None:
    calls = [waiting(1), waiting(2, key="b"), waiting(3), waiting(4)]

    assert orders(continuous(calls)) == [1, 3, 4]


def test_a_forward_is_no_wider_than_its_cap() -> None:
    calls = [waiting(i, rows=2, cap=5) for i in range(4)]

    assert orders(continuous(calls)) == [0, 1]


def test_a_call_wider_than_its_cap_runs_alone() -> None:
    calls = [waiting(1, rows=6), waiting(2), waiting(3)]

    assert orders(continuous(calls)) == [1]


def test_a_narrow_call_does_not_jump_a_wide_one_of_its_key() -> None:
    calls = [waiting(1, rows=2), waiting(2, rows=3), waiting(3, rows=1)]

    assert orders(continuous(calls)) == [1]


def test_a_forward_stacks_its_calls_by_request_so_that_stacks_can_be_kept() -> None:
    calls = [waiting(1, request=3), waiting(2, request=1), waiting(3, request=2)]

    assert [call.request for call in continuous(calls)] == [1, 2, 3]


@given(lines())
def test_a_forward_is_of_one_key_and_within_its_cap_unless_one_call_is_wider(
    parked: list[Parked],
) -> None:
    for policy in POLICIES.values():
        chosen = policy(parked)

        assert len({call.key for call in chosen}) <= 1
        assert len(chosen) <= 1 or sum(call.rows for call in chosen) <= chosen[0].max_rows


@given(lines())
def test_some_call_is_chosen_whenever_any_is_parked(parked: list[Parked]) -> None:
    for policy in POLICIES.values():
        chosen = policy(parked)

        assert bool(chosen) == bool(parked)
        assert len(set(orders(chosen))) == len(chosen)
        assert set(chosen) <= set(parked)


@given(lines(), st.randoms())
def test_the_order_in_which_calls_are_given_does_not_matter(
    parked: list[Parked], rng: random.Random
) -> None:
    shuffled = rng.sample(parked, len(parked))

    for policy in POLICIES.values():
        assert policy(shuffled) == policy(parked)


@given(lines())
def test_nobody_overtakes_within_a_key(parked: list[Parked]) -> None:
    chosen = continuous(parked)

    left_behind = [call for call in parked if call not in chosen]
    for call in chosen:
        assert not [
            other for other in left_behind if other.key == call.key and other.order < call.order
        ]


@given(lines())
def test_a_forward_is_filled_as_far_as_the_line_allows(parked: list[Parked]) -> None:
    chosen = continuous(parked)

    rest = [c for c in parked if chosen and c.key == chosen[0].key and c not in chosen]
    if rest:
        following = min(rest, key=lambda call: call.order)
        assert sum(call.rows for call in chosen) + following.rows > chosen[0].max_rows


@given(lines(max_calls=8), st.integers(1, 60))
def test_nobody_waits_for_more_forwards_than_calls_stood_in_line_before(
    parked: list[Parked], forwards: int
) -> None:
    """Requests rejoin the end of the line after each forward, so no call starves."""
    line, next_order = list(parked), 1000
    ahead = {call: sum(other.order < call.order for other in line) for call in line}
    passed_over = dict.fromkeys(line, 0)
    for _ in range(forwards if line else 0):
        chosen = continuous(line)
        line = [call for call in line if call not in chosen]
        for call in line:
            passed_over[call] += 1
            assert passed_over[call] <= ahead[call]
        for call in chosen:
            again = dataclasses.replace(call, order=(next_order := next_order + 1))
            ahead[again] = len(line)
            passed_over[again] = 0
            line.append(again)


@given(lines(max_calls=6), st.data())
def test_off_finishes_a_request_before_it_turns_to_a_later_one(
    parked: list[Parked], data: st.DataObject
) -> None:
    line, ended, next_order = list(parked), list[int](), 1000
    left = {call.request: data.draw(st.integers(1, 4)) for call in line}
    while line:
        [chosen] = off(line)
        line.remove(chosen)
        left[chosen.request] -= 1
        if left[chosen.request]:
            line.append(dataclasses.replace(chosen, order=(next_order := next_order + 1)))
        else:
            ended.append(chosen.request)

    assert ended == sorted(ended)
