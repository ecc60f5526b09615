"""Routers of a simulation: the server's own, and simple rules that bind at arrival."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from carpool.fleet.router import Binding, Router
from carpool.fleet.worker_load import RoutedRequest, WorkerLoad

BindingRule = Callable[[RoutedRequest, Sequence[WorkerLoad]], int]
"""Chooses the worker of an arriving request; returns its index."""


class ImmediateRouter(Router):
    """Binds every request at its arrival."""

    def __init__(self, rule: BindingRule) -> None:
        super().__init__()
        self._rule = rule

    def assign(self, now_s: float) -> list[Binding]:
        if not (waiting := self.waiting):
            return []
        open_ = [worker for worker in self.workers.values() if worker.is_open]
        if not open_:
            return []
        bindings = []
        for work in waiting:
            worker = open_[self._rule(work, open_)]
            self.bind(work, worker)
            bindings.append(Binding(work.request, worker.id))
        return bindings


def least_work(work: RoutedRequest, workers: Sequence[WorkerLoad]) -> int:
    """The first worker with the least predicted work."""
    left_s = [worker.left_s for worker in workers]
    return left_s.index(min(left_s))


def least_requests(work: RoutedRequest, workers: Sequence[WorkerLoad]) -> int:
    """The first worker with the fewest requests."""
    counts = [len(worker.bound) for worker in workers]
    return counts.index(min(counts))


def round_robin(work: RoutedRequest, workers: Sequence[WorkerLoad]) -> int:
    """Workers in turn, at any load."""
    return work.request % len(workers)


@dataclass(slots=True)
class Random:
    """A random worker."""

    rng: random.Random

    def __call__(self, work: RoutedRequest, workers: Sequence[WorkerLoad]) -> int:
        return self.rng.randrange(len(workers))


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "extra-seconds": Router,
    "least-work": lambda: ImmediateRouter(least_work),
    "least-requests": lambda: ImmediateRouter(least_requests),
    "round-robin": lambda: ImmediateRouter(round_robin),
    "random": lambda: ImmediateRouter(Random(random.Random(0))),
}
"""Routers by name; the first is the server's."""
