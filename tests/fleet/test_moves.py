"""Which running requests move: for priority, from a worker that ends; and the bounds."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.fleet.moves import MAX_PAUSES, MIN_LEFT_S, Moves, left
from carpool.fleet.router import Router
from carpool.fleet.worker_load import StepTable, WorkerLoad
from carpool.worker.watchdog import INTERVAL_S
from support.fake_workers import routed

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
    router.hold(routed(request, kind, steps, priority=priority))
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
    router.hold(routed(7, "a", 50, priority=5))
    assert Moves(router, always, str).pause(0.0) is None
    assert Moves(router, always, lambda _: "the same").pause(0.0) is not None


def test_the_lowest_priority_makes_room_for_a_higher_one_only() -> None:
    router = fleet(1, SOLO)
    for request, priority in ((1, 0), (2, -5), (3, 0)):
        put(router, 0, request, "a", priority=priority)
    moves = Moves(router, always)
    router.hold(routed(4, "a", 50, priority=-5))
    assert moves.pause(0.0) is None
    router.hold(routed(5, "a", 50, priority=5))
    move = moves.pause(0.0)
    assert move is not None
    assert (move.request, move.to, move.why) == (2, None, "priority")


def test_who_would_be_bound_again_before_the_urgent_one_is_not_paused() -> None:
    router = fleet(1, SOLO)
    put(router, 0, 1, "a", steps=5)
    router.hold(routed(2, "a", 50, arrived_s=1e6, priority=1))  # much later
    assert Moves(router, always).pause(0.0) is None


def test_a_worker_that_ends_gives_up_what_others_can_go_on_with() -> None:
    router = fleet(2)
    put(router, 0, 1, "a")
    put(router, 0, 2, "a")
    moves = Moves(router, lambda request: request != 2)
    assert [(one.request, one.to, one.why) for one in moves.drain(0)] == [(1, None, "drain")]
    router.open(1, False)
    assert moves.drain(0) == []  # there is no other one


works = st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(1, 100), st.integers(-5, 5))


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
        router.hold(routed(number, kind, steps, priority=priority))
    moves, count, by_request = Moves(router, always), 0, dict[int, int]()
    seconds = 40
    for tick in range(4 * seconds):
        move = moves.pause(tick / 4)
        if move is None:
            continue
        count += 1
        by_request[move.request] = by_request.get(move.request, 0) + 1
        bound = router.workers[move.worker].bound[move.request]
        assert move.why == "priority"
        assert bound.left_s > MIN_LEFT_S
        assert move.to is None
        router.drop(move.request)
        router.hold(left(bound))
    assert count <= 1 + seconds / INTERVAL_S
    assert max(by_request.values(), default=0) <= MAX_PAUSES


def test_pauses_are_apart_however_many_requests_could_make_room() -> None:
    router = fleet(2, SOLO)
    moves = Moves(router, always)
    for request in range(1, 31):
        put(router, 0, request, "a", steps=1000)
    router.hold(routed(31, "a", 1, priority=5))
    assert [moves.pause(1e9 + 0.5 * tick) is not None for tick in range(4)] == [True, False] * 2
