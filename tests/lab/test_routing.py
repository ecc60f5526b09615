"""Routers compared in the simulator: the promise of the server's own, and its figures."""

import time

import pytest
from routing_promise import (
    LEAST_BELOW_RANDOM,
    MOST_MEAN,
    MOST_P99,
    OWN_ROUTER,
    Scene,
    below_random,
    compare_routers,
    ratios,
    small_scenes,
)

from carpool_lab.simulate.scenario import Model, mix, play
from carpool_lab.tables import TABLES, siblings
from carpool_lab.workload import bursts, generators, plan


@pytest.mark.parametrize("scene", list(small_scenes()), ids=str)
def test_the_router_keeps_its_promise(scene: Scene) -> None:
    mean, p99 = ratios(compare_routers(scene, seeds=(0,), count=150))

    assert mean <= MOST_MEAN
    assert p99 <= MOST_P99


def test_mixed_sizes_have_a_far_shorter_p99_than_with_random_routing() -> None:
    scene = Scene("mixed-sizes", "sizes", 0.7)

    found = compare_routers(scene, (OWN_ROUTER, "random"), seeds=(0, 1), count=300)

    assert below_random(found) >= LEAST_BELOW_RANDOM


def test_one_slow_worker_in_ten_keeps_few_requests() -> None:
    scene = Scene("flux-512", "steps", 0.7, workers=10, slow=0.1)

    mean, p99 = ratios(compare_routers(scene, seeds=(0,), count=400))

    assert mean <= 1.0
    assert p99 <= 0.7


def test_workers_that_die_lose_no_request() -> None:
    scene = Scene("flux-512", "steps", 0.6, workers=6, lifetime_s=60.0)

    found = compare_routers(scene, (OWN_ROUTER, "least-work"), seeds=range(2), count=400)

    assert all(one.ended_s < float("inf") for one in found.values())
    assert found[OWN_ROUTER].mean_s <= MOST_MEAN * found["least-work"].mean_s


@pytest.mark.parametrize("kind", ["uniform", "sizes"])
def test_streamed_weights_are_filled_whatever_the_sizes(kind: str) -> None:
    found = compare_routers(
        Scene("streamed-mixed-sizes", kind, 0.9), (OWN_ROUTER, "least-work"), seeds=(0,), count=150
    )

    mean, p99 = ratios(found)
    assert mean <= MOST_MEAN
    assert p99 <= MOST_P99


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_of_workers_that_seem_equal_the_one_takes_it_that_waited_longest(load: float) -> None:
    mean, p99 = ratios(compare_routers(Scene("sana-1024", "uniform", load), seeds=(0,), count=300))

    assert mean <= MOST_MEAN
    assert p99 <= MOST_P99


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_moves_lose_no_request_and_cost_next_to_nothing(load: float) -> None:
    model = Model(siblings(TABLES["flux-512"]))
    wanted = mix("tenants", model.tables)  # a tenth is of higher priority: others are paused for it
    rate = 4 * load * model.capacity_qps(wanted)
    latency_s = {False: 0.0, True: 0.0}
    for seed in range(3):
        when, what = generators(seed)
        arrivals = plan(bursts(rate, when, size=1), wanted, what, count=150)
        for moves in latency_s:
            played = play(model, arrivals, "continuous", workers=4, lifetime_s=30.0, moves=moves)
            assert all(ride.ended_s < float("inf") for ride in played.requests)
            latency_s[moves] += sum(ride.latency_s for ride in played.requests)
    assert latency_s[True] != latency_s[False]  # there were moves
    assert latency_s[True] <= MOST_MEAN * latency_s[False]


@pytest.mark.parametrize(("table", "count"), [("flux-512", 800), ("qwen-512-streamed", 2500)])
def test_four_workers_do_nearly_four_times_as_much_as_one(table: str, count: int) -> None:
    model = Model([TABLES[table]])
    wanted = mix("steps", model.tables)
    when, what = generators(0)
    arrivals = plan(bursts(1e6, when, size=1), wanted, what, count=count)
    one_s, four_s = (
        play(model, arrivals, "continuous", workers=workers).ended_s for workers in (1, 4)
    )

    assert one_s / four_s >= 3.9


@pytest.mark.parametrize("load", [0.9, 2.0])
def test_a_thousand_workers_are_simulated_in_ten_minutes_for_a_hundred_thousand_requests(
    load: float,
) -> None:
    """The part of that for fewer, in seconds of processor: others may use the machine."""
    model = Model(siblings(TABLES["flux-512"]))
    wanted, count = mix("sizes", model.tables), 1500
    when, what = generators(0)
    rate = 1000 * load * model.capacity_qps(wanted)
    arrivals = plan(bursts(rate, when, size=1), wanted, what, count=count)
    began_s = time.process_time()
    result = play(model, arrivals, "continuous", workers=1000)

    assert len(result.requests) == count
    assert time.process_time() - began_s < 600 * count / 100_000


def test_the_same_scene_gives_the_same_numbers() -> None:
    scene = Scene("flux-512", "tenants", 0.8, workers=3)

    first, second = (compare_routers(scene, (OWN_ROUTER,), seeds=(1,), count=100) for _ in range(2))

    assert first == second
