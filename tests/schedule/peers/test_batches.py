"""Batches of `dynamic` and `request`: one example for each rule, a property for each promise."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from carpool.schedule.peers.batches import fill, wave, wave_deadline
from carpool.schedule.views import QueuedRequest
from carpool.settings.peers.sglang_rules import Caps

LARGE = QueuedRequest(1, signature={"width": 1024}, arrived_s=1.0)
SMALL = QueuedRequest(1, signature={"width": 512}, arrived_s=1.0)
PAINTED = QueuedRequest(1, signature={"image": 0}, arrived_s=1.0)


def many(waiting: QueuedRequest, n: int) -> QueuedRequest:
    return structs.replace(waiting, outputs=n)


def costly(waiting: QueuedRequest, cost: float) -> QueuedRequest:
    return structs.replace(waiting, cost=cost)


def test_everybody_who_fits_joins_the_head_and_who_differs_is_no_barrier() -> None:
    batch = fill(LARGE, [LARGE, SMALL, PAINTED, LARGE], Caps(8), 8)

    assert batch.joined == (0, 3)
    assert batch.outputs == 3
    assert not batch.is_closed
    assert batch.rejects == {"sampling_params.width": 1, "image_conditioning": 1}
    assert batch.stop_reason == "sampling_params.width"


def test_caps_count_outputs_and_who_is_too_large_is_passed_over() -> None:
    batch = fill(many(LARGE, 2), [many(LARGE, 3), many(LARGE, 1)], Caps(4), 8)

    assert (batch.joined, batch.outputs, batch.is_closed) == ((1,), 3, False)
    assert batch.stop_reason == "config_cap:4"
    assert batch.rejects == {"config_cap:4": 1}


def test_who_costs_more_than_is_left_is_passed_over() -> None:
    batch = fill(costly(LARGE, 1), [costly(LARGE, 9), costly(LARGE, 1)], Caps(8, cost=5), 8)

    assert batch.joined == (1,)
    assert batch.rejects == {"cost_budget:10>5": 1}


WAITING = st.builds(
    QueuedRequest, request=st.just(1),
    signature=st.sampled_from([LARGE.signature, SMALL.signature, PAINTED.signature]),
    arrived_s=st.just(0.0), outputs=st.integers(1, 5), cost=st.integers(0, 9).map(float),
)  # fmt: skip
LINES = st.lists(WAITING, min_size=1, max_size=10)
CAPS = st.builds(Caps, st.integers(1, 8), st.none() | st.floats(1, 30))


@given(LINES, CAPS, st.integers(1, 8))
def test_a_batch_keeps_its_caps_unless_it_is_a_lone_head(
    line: list[QueuedRequest], caps: Caps, user_max: int
) -> None:
    caps = dataclasses.replace(caps, outputs=min(caps.outputs, user_max))

    batch = fill(line[0], line[1:], caps, user_max)

    members = [line[0], *(line[1:][place] for place in batch.joined)]
    assert batch.outputs == sum(member.outputs for member in members)
    if len(members) > 1:
        assert batch.outputs <= caps.outputs
        assert caps.cost is None or sum(member.cost for member in members) <= caps.cost
        assert len({member.signature["width"] for member in members}) == 1
    assert list(batch.joined) == sorted(set(batch.joined))


@given(LINES, CAPS)
def test_everybody_in_line_has_joined_or_is_counted_unless_the_batch_is_closed(
    line: list[QueuedRequest], caps: Caps
) -> None:
    batch = fill(line[0], line[1:], caps, 8)

    rejects = [reason for reason in batch.rejects.elements() if not reason.startswith("head:")]
    seen = len(batch.joined) + len(rejects)
    assert batch.is_closed or seen == len(line) - 1
    assert seen <= len(line) - 1


@given(LINES, CAPS, st.integers(1, 8))
def test_nobody_waits_for_more_batches_than_requests_stood_before(
    line: list[QueuedRequest], caps: Caps, user_max: int
) -> None:
    ahead = {place: place for place in range(len(line))}
    places = list(range(len(line)))
    batches = 0
    while places:
        batch = fill(line[places[0]], [line[place] for place in places[1:]], caps, user_max)
        leaving = {places[0], *(places[1:][joined] for joined in batch.joined)}
        assert all(batches <= ahead[place] for place in leaving)
        places = [place for place in places if place not in leaving]
        batches += 1


# Waves


def deadline(keys: str, *, last_arrival_s: float = 10.0, wait_s: float = 0.02) -> float:
    return wave_deadline(len(keys), 4, began_s=10.0, last_arrival_s=last_arrival_s, wait_s=wait_s)


def test_a_wave_waits_for_a_fifth_of_its_wait_after_the_last_arrival() -> None:
    assert deadline("a") == pytest.approx(10.004)
    assert deadline("a", last_arrival_s=3.0) == pytest.approx(10.004)
    assert deadline("aa", last_arrival_s=10.003) == pytest.approx(10.007)


def test_a_wave_waits_for_at_most_50_ms_after_the_last_arrival() -> None:
    assert deadline("aa", last_arrival_s=10.1, wait_s=1.0) == pytest.approx(10.15)


def test_a_wave_waits_for_no_more_than_its_wait_in_all() -> None:
    assert deadline("aaa", last_arrival_s=10.019) == pytest.approx(10.02)


def test_a_wave_starts_at_once_when_as_many_are_in_line_as_it_may_have() -> None:
    assert deadline("aaaa") == 10.0
    assert deadline("abab") == 10.0  # vLLM-Omni counts them all
    assert deadline("a", wait_s=0.0) == 10.0


def test_a_wave_waits_out_its_quiet_window_though_another_key_stands_behind() -> None:
    assert deadline("ab") == pytest.approx(10.004)


@given(st.text("abc", min_size=1, max_size=12), st.integers(1, 5))
def test_waves_run_the_line_in_order_and_none_mixes_keys(keys: str, max_num_seqs: int) -> None:
    line, ran = keys, ""
    while line:
        size = wave(line, max_num_seqs)
        assert 1 <= size <= max_num_seqs
        assert len(set(line[:size])) == 1
        line, ran = line[size:], ran + line[:size]

    assert ran == keys


@given(st.text("ab", min_size=1, max_size=6), st.floats(0, 20), st.floats(0, 2))
def test_a_wave_never_starts_before_the_engine_is_free_nor_after_its_wait(
    keys: str, last_arrival_s: float, wait_s: float
) -> None:
    starts_s = deadline(keys, last_arrival_s=last_arrival_s, wait_s=wait_s)

    assert 10.0 <= starts_s <= 10.0 + wait_s
