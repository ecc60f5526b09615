"""Which running requests move: for priority, from a worker that ends; and the bounds."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.fleet.moves import (
    MAX_MOVES,
    MIN_LEFT_OF_COST,
    MOVES_AT_ONCE,
    MOVES_PER_S,
    MoveCost,
    Moves,
    left,
)
from carpool.fleet.router import Router
from carpool.fleet.worker_load import Bound, RoutedRequest, StepTable, WorkerLoad

SHARED: StepTable = (1.0, 1.05, 1.1, 1.15)  # rows are nearly free
SOLO: StepTable = (1.0, 2.0, 3.0, 4.0)


def fleet(workers: int, table: StepTable = SHARED, kinds: Sequence[str] = "ab") -> Router:
    router = Router()
    for number in range(workers):
        router.add_worker(WorkerLoad(number, dict.fromkeys(kinds, table)))
    return router


def put(
    router: Router, worker: int, request: int, kind: str, steps: int = 50, priority: int = 0
) -> None:
    router.hold(RoutedRequest(request, kind, steps, priority=priority))
    assert router.bind_to(request, worker)


def always(_: int) -> bool:
    return True


def test_no_request_is_paused_where_it_would_start_over() -> None:
    """As where files were exchanged between the starts of two workers."""
    router = fleet(2, SOLO)
    put(router, 0, 1, "a")
    put(router, 0, 2, "a")
    for request in (3, 4, 5, 6):
        put(router, 1, request, "a")
    router.hold(RoutedRequest(7, "a", 50, priority=5))
    assert Moves(router, always, str).choose(0.0) is None
    assert Moves(router, always, lambda _: "the same").choose(0.0) is not None


def test_the_lowest_priority_makes_room_for_a_higher_one_only() -> None:
    router = fleet(1, SOLO)
    for request, priority in ((1, 0), (2, -5), (3, 0)):
        put(router, 0, request, "a", priority=priority)
    moves = Moves(router, always)
    router.hold(RoutedRequest(4, "a", 50, priority=-5))
    assert moves.choose(0.0) is None
    router.hold(RoutedRequest(5, "a", 50, priority=5))
    move = moves.choose(0.0)
    assert move is not None
    assert (move.request, move.to, move.why) == (2, None, "priority")


def test_who_would_be_bound_again_before_the_urgent_one_is_not_paused() -> None:
    router = fleet(1, SOLO)
    put(router, 0, 1, "a", steps=5)
    router.hold(RoutedRequest(2, "a", 50, arrived_s=1e6, priority=1))  # much later
    assert Moves(router, always).choose(0.0) is None


def test_a_worker_that_ends_gives_up_what_others_can_go_on_with() -> None:
    router = fleet(2)
    put(router, 0, 1, "a")
    put(router, 0, 2, "a")
    moves = Moves(router, lambda request: request != 2)
    assert [(one.request, one.to, one.why) for one in moves.drain(0)] == [(1, None, "drain")]
    router.open(1, False)
    assert moves.drain(0) == []  # there is no other one


works = st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(1, 100), st.integers(-5, 5))


def test_a_move_costs_what_the_last_ones_took_and_the_replay_of_all_steps_that_were_made() -> None:
    bound = Bound(RoutedRequest(1, "a", 50), 30.0, SOLO)
    cost = MoveCost()
    assert cost.of(bound) > 0  # a guess
    for seconds in (0.5, 9.0, 0.5):
        cost.moved(seconds)
    cost.replayed(10, 0.2)
    cost.replayed(0, 0.0)  # of a request that had not made a step: says nothing of steps
    assert cost.of(bound) == pytest.approx(0.5 + 20 * 0.02)
    again = Bound(left(bound), 10.0, SOLO)  # moves for the second time
    assert cost.of(again) == pytest.approx(0.5 + 40 * 0.02)
    for _ in range(100):
        cost.moved(0.1)
    assert cost.start_s == 0.1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(works, min_size=1, max_size=16),
    st.lists(works, max_size=3),
    st.sampled_from([SHARED, SOLO, (0.01, 0.011), (2.0, 2.5, 5.0)]),
)
def test_whatever_runs_moves_are_bounded_and_each_is_worth_it(
    running: list[tuple[int, str, int, int]],
    waiting: list[tuple[int, str, int, int]],
    table: StepTable,
) -> None:
    router = fleet(4, table)
    for number, (worker, kind, steps, priority) in enumerate(running, 1):
        put(router, worker, number, kind, steps, priority=priority)
    for number, (_, kind, steps, priority) in enumerate(waiting, 100):
        router.hold(RoutedRequest(number, kind, steps, priority=priority))
    moves, count, by_request = Moves(router, always), 0, dict[int, int]()
    seconds = 40
    for tick in range(4 * seconds):
        move = moves.choose(tick / 4)
        if move is None:
            continue
        count += 1
        by_request[move.request] = by_request.get(move.request, 0) + 1
        bound = router.workers[move.worker].bound[move.request]
        assert move.why == "priority"
        assert bound.left_s > MIN_LEFT_OF_COST * moves.cost.of(bound)
        assert move.to is None
        router.drop(move.request)
        router.hold(left(bound))
    assert count <= MOVES_AT_ONCE + seconds * MOVES_PER_S
    assert max(by_request.values(), default=0) <= MAX_MOVES


def test_the_bucket_of_moves_never_overflows() -> None:
    router = fleet(2, SOLO)
    moves = Moves(router, always)
    moves.choose(inf)
    for request in range(1, 31):
        put(router, 0, request, "a", steps=1000)
    router.hold(RoutedRequest(31, "a", 1, priority=5))
    assert sum(moves.choose(1e9) is not None for _ in range(30)) <= MOVES_AT_ONCE
