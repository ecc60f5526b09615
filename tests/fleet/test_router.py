"""The router: what is bound where, what waits, and that neither depends on chance."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.fleet.router import LOOKED_AT, Router
from carpool.fleet.worker_load import Bound, StepTable, WorkerLoad, extra_s, paying_width, step_s
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.sweep import step_seconds
from carpool.schedule.views import CallKind
from support.fake_workers import routed

SLOW: StepTable = tuple(float(n) for n in range(1, 9))  # rows gain nothing
FREE: StepTable = (1.0,) * 8  # rows are free


def router_of(*tables: Mapping[Any, StepTable], **options: Any) -> Router:
    router = Router(**options)
    for number, table in enumerate(tables):
        router.add_worker(WorkerLoad(number, table))
    return router


def bound(router: Router, *works: Any, now_s: float = 0.0) -> dict[int, int]:
    for work in works:
        router.hold(work)
    return {one.request: one.worker for one in router.assign(now_s)}


def test_what_a_request_adds_is_its_own_time_where_nobody_is() -> None:
    assert extra_s(routed(1, "a", 10), WorkerLoad(0), SLOW) == 10.0


def test_a_request_that_shares_free_rows_adds_its_own_time_only() -> None:
    worker = WorkerLoad(0)
    worker.bound[1] = Bound(routed(1, "a", 10), 10, FREE)

    assert extra_s(routed(2, "a", 10), worker, FREE) == 10.0
    assert extra_s(routed(2, "b", 10), worker, FREE) == 20.0  # another kind: one waits


def test_where_rows_gain_nothing_the_longer_of_two_waits_for_the_shorter() -> None:
    worker = WorkerLoad(0)
    worker.bound[1] = Bound(routed(1, "a", 30), 30, SLOW)

    assert extra_s(routed(2, "a", 10), worker, SLOW) == 20.0  # its own 10, and 10 of delay


def test_a_round_of_more_than_the_widest_forward_takes_several() -> None:
    assert step_s((1.0, 1.5), 5) == 1.5 + 1.5 + 1.0


def test_requests_of_a_kind_go_together_where_rows_are_free_and_others_apart() -> None:
    tables = {"a": FREE, "b": FREE}
    router = router_of(tables, tables)
    first = bound(router, routed(1, "a", 10))
    second = bound(router, routed(2, "b", 10))

    third = bound(router, routed(3, "b", 10))

    assert first[1] != second[2] == third[3]


def test_what_a_worker_did_since_it_was_told_is_reckoned() -> None:
    router = router_of({"a": SLOW}, {"a": SLOW})
    assert bound(router, routed(1, "a", 10)) == {1: 0}
    assert bound(router, routed(2, "a", 10), now_s=4.0) == {2: 1}
    router.progressed(1, {2: 6.0}, now_s=8.0)

    assert bound(router, routed(3, "a", 10), now_s=9.0) == {3: 0}  # one step left; five


def test_what_a_request_took_that_has_ended_is_not_reckoned_twice() -> None:
    router = router_of({"a": SLOW}, {"a": SLOW})
    assert bound(router, routed(1, "a", 10)) == {1: 0}
    assert bound(router, routed(2, "a", 12)) == {2: 1}
    assert bound(router, routed(3, "a", 10)) == {3: 0}
    router.drop(1)  # at 10 s: the other one has two steps left, and this ten

    assert bound(router, routed(4, "a", 10), now_s=10.0) == {4: 1}


def test_the_longer_the_line_the_more_are_bound_ahead_at_most_as_many_as_run_together() -> None:
    """They are encoded in few forwards."""
    router = router_of({"a": FREE})
    given_ = [bound(router, routed(number, "a", 10)) for number in range(1, 61)]

    assert sum(map(len, given_[:12])) == 10  # eight run, a quarter more is ahead
    assert sum(map(len, given_)) == 16


def test_requests_over_streamed_weights_are_spread_beyond_the_widest_forward_too() -> None:
    kind, costs = CallKind("denoise", 1), Costs({CallKind("denoise", 1): Curve({1: 0.2, 8: 1.6})})
    costs.streams = {"denoise": 3.0}
    table = tuple(step_seconds(costs, kind, 1, most_rows=8, most_running=32))
    router = Router()
    for number in (0, 1):
        router.add_worker(WorkerLoad(number, {kind: table}, shares_sweeps=True))
    for number in range(1, 41):
        bound(router, routed(number, kind, 50))

        counts = [len(worker.bound) for worker in router.workers.values()]
        assert abs(counts[0] - counts[1]) <= 1


def test_requests_of_all_sizes_that_share_sweeps_add_what_the_copies_do_not_hide() -> None:
    large: StepTable = tuple(max(4.0, 2.0 * n) for n in range(1, 9))
    small: StepTable = tuple(max(4.0, 1.0 * n) for n in range(1, 9))
    worker = WorkerLoad(0, shares_sweeps=True)
    worker.bound[1] = Bound(routed(1, "large", 20), 20, large)

    assert extra_s(routed(9, "small", 10), worker, small) == 10 * 4.0

    worker.bound[2] = Bound(routed(2, "large", 20), 5, large)
    assert extra_s(routed(9, "small", 10), worker, small) == 10 * 5.0 + 15 * 1.0

    # 12 s are three steps of both
    assert extra_s(routed(9, "small", 10), worker, small, 12.0) == 10 * 5.0 + 12 * 1.0


def test_ties_go_to_the_worker_with_the_lowest_id() -> None:
    tables = {"a": SLOW}
    assert bound(router_of(tables, tables, tables), routed(1, "a", 10)) == {1: 0}


def test_a_request_waits_for_a_fast_worker_rather_than_run_on_one_that_is_far_slower() -> None:
    slower = {"a": tuple(20 * seconds for seconds in SLOW)}
    router = router_of({"a": SLOW}, slower)
    bound(router, routed(1, "a", 10))
    router.progressed(0, {1: 1.0}, 0.0)

    assert bound(router, routed(2, "a", 10)) == {2: 0}
    assert bound(router, routed(3, "a", 10)) == {}  # held: the fast one has enough to do
    router.drop(1)
    assert {one.request: one.worker for one in router.assign(0.0)} == {3: 0}


def test_what_waits_is_bound_when_a_worker_has_room_and_not_before() -> None:
    router = router_of({"a": SLOW})
    given_ = [bound(router, routed(number, "a", 10)) for number in range(1, 6)]

    assert [len(one) for one in given_] == [1, 1, 0, 0, 0]
    assert len(router.waiting) == 3
    router.drop(1)
    assert [one.request for one in router.assign(0.0)] == [3]


def test_a_much_shorter_request_is_bound_although_longer_ones_fill_the_workers() -> None:
    router = router_of({"a": SLOW})
    bound(router, routed(1, "a", 100))
    bound(router, routed(2, "a", 100))

    assert bound(router, routed(3, "a", 90)) == {}
    assert bound(router, routed(4, "a", 2)) == {4: 0}


def test_higher_priority_goes_first_and_deadlines_that_press_before_it() -> None:
    router = router_of({"a": SLOW})
    bound(router, routed(1, "a", 10))
    bound(router, routed(2, "a", 10))
    assert bound(router, routed(3, "a", 10)) == {}
    bound(router, routed(4, "a", 10, priority=5))
    bound(router, routed(5, "a", 10, deadline_s=15.0))
    order = []
    for ended in (1, 2, 5):
        router.drop(ended)
        order += [one.request for one in router.assign(0.0)]

    assert order == [5, 4, 3]


def test_tenants_share_the_fleet_by_their_weights_and_not_by_how_much_they_ask_for() -> None:
    router = router_of({"a": SLOW}, fair_share={"big": 3.0, "*": 1.0})
    numbers = itertools.count(1)
    works = [
        routed(next(numbers), "a", 10, tenant=tenant) for tenant in ["many"] * 30 + ["big"] * 30
    ]
    served: list[str] = []
    running = list(bound(router, *works))
    while len(served) < 24:
        request = running.pop(0)
        served.append(works[request - 1].tenant)
        router.drop(request)
        running += [one.request for one in router.assign(0.0)]

    assert 15 <= served[4:].count("big") <= 17  # of the 20 after those that were bound together


def test_nobody_waits_for_a_guess_and_what_is_known_is_served_as_wide_as_is_worth_it() -> None:
    router = router_of({}, {})
    for number in range(100):
        router.hold(routed(number, "a", 28))
    unknown_s = router.held_for_s()

    router.learned(0, {"a": FREE})
    known_s = router.held_for_s()
    for number in range(100):
        router.drop(number)

    assert unknown_s == 0.0
    assert known_s == 100 * 28 / 8 / 2  # eight rows a forward, two workers
    assert (router.held_s, router.held_for_s()) == (0.0, 0.0)


def test_a_worker_that_is_closed_gets_nothing_and_what_a_removed_one_had_comes_back() -> None:
    tables = {"a": SLOW}
    router = router_of(tables, tables)
    work = routed(1, "a", 10)
    assert bound(router, work) == {1: 0}

    returned = [(back.request, back.kind, back.steps) for back in router.remove_worker(0)]
    assert returned == [(1, "a", 10)]
    router.open(1, is_open=False)
    assert bound(router, work) == {}
    router.open(1, is_open=True)
    assert [one.worker for one in router.assign(0.0)] == [1]


@pytest.mark.parametrize("requests", [9, 14, 40])
def test_workers_that_are_closed_are_no_room(requests: int) -> None:
    """They load, are dead or leave: what comes is not heaped on those that are open for them."""
    table = {"a": (1.0, 1.5, 2.0, 2.6)}
    works = [routed(n, "a", 30) for n in range(1, requests + 1)]
    alone, loading = router_of(table), router_of(*[table] * 8)
    for worker in range(1, 8):
        loading.open(worker, is_open=False)

    assert bound(loading, *works) == bound(alone, *works)
    assert len(loading.waiting) == len(alone.waiting)


def test_no_worker_gets_more_at_one_moment_than_it_runs_together() -> None:
    router = Router()
    for number in range(2):
        router.add_worker(WorkerLoad(number, {"a": FREE}, max_requests=3))

    taken = bound(router, *(routed(n, "a", 30) for n in range(1, 13)))

    assert sorted(taken.values()) == [0, 0, 0, 1, 1, 1]
    assert len(router.waiting) == 6


def test_a_guess_that_is_wrong_does_not_heap_everything_on_one_worker() -> None:
    tables = {"a": FREE}
    router = router_of(
        tables, {"a": tuple(100 * s for s in FREE)}, {"a": tuple(100 * s for s in FREE)}
    )
    for number in range(1, 200):
        bound(router, routed(number, "a", 10))

    most = max(len(worker.bound) for worker in router.workers.values())
    assert most <= 32


kinds = st.sampled_from(["a", "b"])
works = st.lists(st.tuples(kinds, st.integers(1, 50), st.integers(-2, 2)), min_size=1, max_size=30)


@given(works, st.integers(1, 5), st.integers(0, 10**6))
def test_every_request_is_bound_once_or_waits_whatever_happens(
    asked: list[tuple[str, int, int]], workers: int, seed: int
) -> None:
    rng = random.Random(seed)
    router = router_of(*[{"a": SLOW, "b": FREE}] * workers)
    waiting, running, ended = set[int](), dict[int, int](), set[int]()
    for number, (kind, steps, priority) in enumerate(asked, 1):
        router.hold(routed(number, kind, steps, arrived_s=float(number), priority=priority))
        waiting.add(number)
        if running and rng.random() < 0.4:
            gone = rng.choice(sorted(running))
            assert router.drop(gone)
            del running[gone]
            ended.add(gone)
        for one in router.assign(float(number)):
            assert one.request in waiting
            waiting.remove(one.request)
            running[one.request] = one.worker
    assert {one.request for one in router.waiting} == waiting
    assert {r for w in router.workers.values() for r in w.bound} == set(running)
    assert not any(router.drop(number) for number in ended)
    while running:  # whatever waits is bound in the end
        gone = min(running)
        router.drop(gone)
        del running[gone]
        for one in router.assign(1000.0):
            waiting.remove(one.request)
            running[one.request] = one.worker
    assert not waiting
    assert router.held_s == 0.0


@pytest.mark.parametrize("workers", [16, 1000])
def test_a_choice_looks_at_few_workers_however_many_there_are(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(work: Any, worker: WorkerLoad, table: StepTable, now_s: float) -> float:
        asked.append(worker.id)
        return extra_s(work, worker, table, now_s)

    monkeypatch.setattr("carpool.fleet.router.extra_s", counted)
    router = router_of(*[{"a": SLOW, "b": FREE}] * workers)
    for number in range(3 * workers):
        asked.clear()
        held = bound(router, routed(number, "ab"[number % 2], 20))
        assert len(asked) <= 2 * 2 * LOOKED_AT * (1 + len(held))  # two kinds may wait


def test_of_requests_that_come_to_an_idle_fleet_the_longest_go_to_different_workers() -> None:
    tables = {"a": SLOW}
    works = [routed(n, "a", steps) for n, steps in enumerate((10, 10, 40, 40), 1)]

    taken = bound(router_of(tables, tables), *works)

    assert taken[3] != taken[4]
    assert taken[1] != taken[2]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_paying_width_is_one_that_the_table_has(seconds: list[float], backlog: int) -> None:
    table = tuple(itertools.accumulate(seconds))
    assert 1 <= paying_width(table, backlog, 0.05) <= len(table)
