"""How many workers there should be: bounds, growth, and nothing that swings."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.fleet.autoscaler import UP_S, Autoscaler, Demand, Scale

SCALE = Scale(low=1, high=8, wait_s=10.0, idle_s=60.0)
scales = st.tuples(st.integers(1, 6), st.integers(0, 20)).map(
    lambda pair: Scale(pair[0], pair[0] + pair[1], wait_s=10.0, idle_s=60.0)
)
loads = st.lists(st.tuples(st.integers(0, 30), st.floats(0, 5000)), min_size=1, max_size=200)


class Fleet:
    """Workers that are there at once; a look every second."""

    def __init__(self, scale: Scale, workers: int) -> None:
        self.autoscaler, self.workers, self.now_s = Autoscaler(scale), workers, 0.0

    def look(self, busy: int, held_s: float) -> int:
        self.now_s += 1.0
        demand = Demand(self.workers, min(busy, self.workers), held_s)
        self.workers = self.autoscaler.workers(self.now_s, demand)
        return self.workers


@given(scales, st.integers(0, 40), loads)
def test_the_bounds_hold_whatever_the_load(
    scale: Scale, workers: int, load: list[tuple[int, float]]
) -> None:
    fleet = Fleet(scale, workers)
    for busy, held_s in load:
        assert scale.low <= fleet.look(busy, held_s) <= scale.high


@given(loads)
def test_no_worker_goes_within_the_idle_time_of_one_that_came(
    load: list[tuple[int, float]],
) -> None:
    fleet, came_s = Fleet(SCALE, 1), float("-inf")
    for busy, held_s in load:
        before = fleet.workers
        after = fleet.look(busy, held_s)
        if after > before:
            came_s = fleet.now_s
        assert after >= before or fleet.now_s - came_s >= SCALE.idle_s


@given(st.integers(1, 8), st.floats(0, 9.9), st.integers(0, 8))
def test_a_wait_below_the_limit_never_adds_a_worker(workers: int, wait_s: float, busy: int) -> None:
    fleet = Fleet(SCALE, workers)
    assert all(fleet.look(busy, wait_s * fleet.workers) <= workers for _ in range(200))


@given(st.integers(1, 8), st.integers(0, 8), st.floats(0, 2000))
def test_a_load_that_stays_comes_to_rest(workers: int, busy: int, held_s: float) -> None:
    """Within so many idle times as there may be workers, it changes no more."""
    fleet = Fleet(SCALE, workers)
    for _ in range(int(SCALE.idle_s * SCALE.high)):
        fleet.look(busy, held_s)
    rest = fleet.workers
    assert all(fleet.look(busy, held_s) == rest for _ in range(200))


def test_a_long_queue_adds_what_it_needs_at_most_twice_as_many_at_a_time() -> None:
    fleet = Fleet(SCALE, 1)
    counts = [fleet.look(1, 70.0) for _ in range(12)]
    assert counts[: int(UP_S)] == [1] * int(UP_S)
    assert sorted(set(counts)) == [1, 2, 4, 7]
    assert counts[-1] == 7  # seventy seconds in ten


def test_a_burst_that_is_shorter_than_three_seconds_changes_nothing() -> None:
    fleet = Fleet(SCALE, 2)
    for second in range(60):
        assert fleet.look(2, 500.0 if second % 3 == 0 else 0.0) == 2


def test_workers_go_one_by_one_once_some_were_idle_all_the_time() -> None:
    fleet = Fleet(SCALE, 4)
    counts = [fleet.look(2, 0.0) for _ in range(100)]
    assert counts[:60] == [4] * 60
    assert counts[60:64] == [3, 2, 2, 2]


def test_one_busy_moment_in_the_idle_time_keeps_all() -> None:
    fleet = Fleet(SCALE, 4)
    assert all(fleet.look(4 if second % 50 == 0 else 1, 0.0) == 4 for second in range(300))
