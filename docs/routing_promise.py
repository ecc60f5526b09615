"""Routers compared on the same requests, and the promise of the server's own.

The promise, at every point: compared with the best other router, the mean latency of
`extra-seconds` is at most 1.02 times as high, and its p99 at most 1.10 times.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from carpool.fleet.router import Binding, Router
from carpool.fleet.worker_load import RoutedRequest, WorkerLoad
from carpool_lab.simulate.report import numbers
from carpool_lab.simulate.scenario import Model, mix, play
from carpool_lab.tables import MIXED_SIZES, TABLES, siblings
from carpool_lab.workload import Mix, Setting, bursts, generators, plan

OWN_ROUTER = "extra-seconds"
MOST_MEAN, MOST_P99 = 1.02, 1.10
LEAST_BELOW_RANDOM = 0.37  # p99 of mixed sizes at 0.7 of capacity


BindingRule = Callable[[RoutedRequest, Sequence[WorkerLoad]], int]
"""Chooses the worker of an arriving request; returns its index."""


class ImmediateRouter(Router):
    """Binds every request at its arrival."""

    def __init__(self, rule: BindingRule) -> None:
        super().__init__()
        self._rule = rule

    def assign(self, now_s: float) -> list[Binding]:
        open_ = [worker for worker in self.workers.values() if worker.is_open]
        bindings = []
        for work in self.waiting if open_ else ():
            worker = open_[self._rule(work, open_)]
            self.bind(work, worker)
            bindings.append(Binding(work.request, worker.id))
        return bindings


def least_work(work: RoutedRequest, workers: Sequence[WorkerLoad]) -> int:
    """The first worker with the least predicted work."""
    return min(range(len(workers)), key=lambda place: workers[place].left_s)


def least_requests(work: RoutedRequest, workers: Sequence[WorkerLoad]) -> int:
    """The first worker with the fewest requests."""
    return min(range(len(workers)), key=lambda place: len(workers[place].bound))


def round_robin(work: RoutedRequest, workers: Sequence[WorkerLoad]) -> int:
    """Workers in turn, at any load."""
    return work.request % len(workers)


def random_worker(rng: random.Random) -> BindingRule:
    return lambda work, workers: rng.randrange(len(workers))


ROUTERS: Mapping[str, Callable[[], Router]] = {
    OWN_ROUTER: Router,
    "least-work": lambda: ImmediateRouter(least_work),
    "least-requests": lambda: ImmediateRouter(least_requests),
    "round-robin": lambda: ImmediateRouter(round_robin),
    "random": lambda: ImmediateRouter(random_worker(random.Random(0))),
}
"""Routers by name; the first is the server's."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A scenario for the comparison of routers."""

    table: str  # "mixed-sizes" for `MIXED_SIZES`
    mix: str
    load: float
    workers: int = 4
    slow: float = 0.0  # see `scenario.play`
    lifetime_s: float = inf

    def __str__(self) -> str:
        more = f", {self.slow:g} slow" if self.slow else ""
        more += f", live {self.lifetime_s:g} s" if self.lifetime_s < inf else ""
        return f"{self.table}, {self.mix}, {self.workers} workers{more}, load {self.load:g}"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one router, seconds; means over seeds."""

    mean_s: float
    p99_s: float
    ended_s: float


def compare_routers(
    scene: Scene, routers: Sequence[str] = tuple(ROUTERS), *, seeds: Sequence[int], count: int
) -> dict[str, Latencies]:
    """Simulate a scene with every router.

    Args:
        seeds: seeds of arrivals; the results are means over seeds.
        count: requests for each seed.
    """
    if scene.table == "mixed-sizes":
        model = Model(MIXED_SIZES)
        requests = Mix([Setting({"size": table.size}) for table in MIXED_SIZES])
    else:
        model = Model(siblings(TABLES[scene.table]))
        requests = mix(scene.mix, model.tables)
    rate = scene.load * scene.workers * model.capacity_qps(requests)
    latencies: dict[str, list[Latencies]] = {name: [] for name in routers}
    for seed in seeds:
        times_rng, requests_rng = generators(seed)
        arrivals = plan(bursts(rate, times_rng, size=1), requests, requests_rng, count=count)
        for name, runs in latencies.items():
            result = play(
                model,
                arrivals,
                "continuous",
                workers=scene.workers,
                router=ROUTERS[name](),
                slow=scene.slow,
                lifetime_s=scene.lifetime_s,
            )
            latency = numbers(result, 5.0).latency
            runs.append(Latencies(latency.mean_s, latency.p99_s, result.ended_s))
    return {name: _mean(runs) for name, runs in latencies.items()}


def ratios(latencies: Mapping[str, Latencies]) -> tuple[float, float]:
    """Mean and p99 of the server's router, relative to the best other router."""
    own, rest = latencies[OWN_ROUTER], [x for name, x in latencies.items() if name != OWN_ROUTER]
    mean_s, p99_s = min(x.mean_s for x in rest), min(x.p99_s for x in rest)
    return own.mean_s / mean_s, own.p99_s / p99_s


def below_random(latencies: Mapping[str, Latencies]) -> float:
    """The relative reduction of p99 against random routing."""
    return 1 - latencies[OWN_ROUTER].p99_s / latencies["random"].p99_s


def small_scenes() -> Iterator[Scene]:
    """The scenes of `make test`."""
    for table in ("flux-512", "qwen-512", "sana-512"):
        for name in ("steps", "sizes"):
            for load in (0.5, 0.9):
                yield Scene(table, name, load)


def all_scenes() -> Iterator[Scene]:
    """The scenes of `make simulate-routing`."""
    for name, table in TABLES.items():
        for kind in ("uniform", "steps", "sizes", "tenants"):
            if kind == "sizes" and len(siblings(table)) == 1:
                continue
            for load in (0.3, 0.6, 0.9, 1.2):
                yield Scene(name, kind, load)
    for load in (0.4, 0.7, 0.9):
        yield Scene("mixed-sizes", "sizes", load)
        yield Scene("mixed-sizes", "sizes", load, workers=16)
        for name in ("flux-512", "qwen-512", "sana-512"):
            yield Scene(name, "steps", load, workers=10, slow=0.1)
            yield Scene(name, "steps", load, workers=8, lifetime_s=300.0)


def lines(latencies: Mapping[str, Latencies]) -> list[str]:
    """A table of routers as text."""
    rows = [f"{'router':<16} {'mean s':>9} {'p99 s':>9} {'all s':>9}"]
    rows += [
        f"{name:<16} {latency.mean_s:>9.3f} {latency.p99_s:>9.3f} {latency.ended_s:>9.1f}"
        for name, latency in latencies.items()
    ]
    return rows


def _mean(runs: Sequence[Latencies]) -> Latencies:
    def of(name: str) -> Any:
        return statistics.fmean(getattr(latency, name) for latency in runs)

    return Latencies(of("mean_s"), of("p99_s"), of("ended_s"))
