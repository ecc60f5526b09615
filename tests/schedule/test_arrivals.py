"""How busy the device is going to be: by those who come while others run."""

import random

import pytest

from carpool.schedule.arrivals import MAX_GROWTH, LoadEstimate
from carpool.schedule.cost import Curve
from carpool.schedule.views import ParkedCall, QueuedRequest

CURVE = Curve({1: 1.0})  # rows gain nothing: one request after the other
CALL = ParkedCall(1, 1, "key")


def queued(number: int, work_s: float = 1.0) -> QueuedRequest:
    return QueuedRequest(number, whole_s=work_s, left_s=work_s)


def forwards(load: LoadEstimate, began_s: float, count: int) -> None:
    """A second each."""
    for n in range(count):
        load.ran([CALL], CURVE, began_s + n)


def bursts(load: LoadEstimate, *, clients: int, count: int, late_s: float = 0.0) -> float:
    """Each when the one before is done: when the last one is. One request comes first."""
    now_s, number = 0.0, 0
    for _ in range(count):
        load.arrived([queued(number + 1)], 0, now_s)
        if late_s:
            load.ran([CALL], CURVE, now_s)
        load.arrived([queued(number + n + 1) for n in range(1, clients)], 1, now_s + late_s)
        forwards(load, now_s + 1.0, clients)
        number, now_s = number + clients, now_s + clients + 1.0
        load.arrived([], 0, now_s)
    return now_s


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_bursts_of_which_each_waits_for_the_one_before_let_nobody_be_expected(
    late_s: float,
) -> None:
    """Also where some of them come only after the first forward has begun."""
    load = LoadEstimate()
    now_s = bursts(load, clients=16, count=9, late_s=late_s)

    assert load.share(now_s) == 0.0
    assert load.backlog(16.0, now_s) == 16.0


def test_who_comes_in_the_first_sweep_has_come_with_those_in_it() -> None:
    """Its forwards, of several keys, all begin at once."""
    load = LoadEstimate()
    for burst in range(3):
        now_s = 10.0 * burst
        load.arrived([queued(4 * burst + 1)], 0, now_s)
        for _ in range(3):
            load.ran([CALL], CURVE, now_s)
        load.arrived([queued(4 * burst + n) for n in (2, 3, 4)], 1, now_s + 1.0)
        forwards(load, now_s + 3.0, 4)
        load.arrived([], 0, now_s + 7.0)

    assert load.share(27.0) == 0.0


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_of_requests_that_come_by_chance_the_share_is_their_rate_times_their_work(
    rate: float,
) -> None:
    found = []
    for seed in range(20):
        rng, load = random.Random(seed), LoadEstimate()
        comes_s, now_s, number, left = rng.expovariate(rate), 0.0, 0, 0.0
        while number < 600:  # a device that runs a forward of a second for each 1 s of work
            if left <= 0:
                load.arrived([], 0, now_s)
                now_s = max(now_s, comes_s)
            running = bool(left > 0)
            while comes_s <= now_s:
                number += 1
                work_s = float(rng.randint(2, 8)) / 5
                load.arrived([queued(number, work_s)], int(running), now_s)
                left, running = left + 5 * work_s, True
                comes_s += rng.expovariate(rate)
            load.ran([CALL], CURVE, now_s)
            now_s, left = now_s + 0.2, left - 1.0
        found.append(load.share(now_s))

    assert sum(found) / len(found) == pytest.approx(rate, rel=0.1)


def test_an_engine_that_is_never_empty_is_taken_for_as_busy_as_may_be() -> None:
    load = LoadEstimate()
    load.arrived([queued(1)], 0, 0.0)
    forwards(load, 0.0, 2)
    for n in range(2, 100):  # two seconds of work a second
        load.arrived([queued(n, 2.0)], n, n + 0.5)
        load.ran([CALL], CURVE, float(n) + 0.5)

    assert load.share(100.0) == 1 - 1 / MAX_GROWTH
    assert load.backlog(10.0, 100.0) == pytest.approx(10.0 * MAX_GROWTH)


def test_whoever_came_is_counted_once_however_often_the_line_is_seen() -> None:
    load = LoadEstimate()
    load.arrived([queued(1)], 0, 0.0)
    forwards(load, 0.0, 3)
    line = [queued(2), queued(3), queued(4)]
    for now_s in (3.0, 4.0, 5.0):
        load.arrived(line, 1, now_s)
    once = load.share(6.0)

    load.arrived(line, 1, 6.0)
    assert load.share(6.0) == once > 0
