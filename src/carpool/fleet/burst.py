"""Spreads requests that come together over workers with room, so that the last of them ends early.

Requests are bound longest first, each where it ends first, then moved and exchanged while that
makes the last of them end earlier.

Source: longest first: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied
Mathematics 17(2), 1969.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from carpool.fleet.worker_index import WorkerIndex
from carpool.fleet.worker_load import Bound, RoutedRequest, WorkerLoad

MAX_SWAPPED = 24  # requests bound at one moment: of more, none are exchanged


class Burst:
    """Plans the workers of requests that are bound at one moment; changes none of them.

    Args:
        workers: by their ids.
        index: of them; finds the places that are looked at.
        as_bound: a request as it would be on a worker.
    """

    def __init__(
        self,
        workers: Mapping[int, WorkerLoad],
        index: WorkerIndex,
        as_bound: Callable[[RoutedRequest, WorkerLoad], Bound],
    ) -> None:
        self._workers, self._index, self._as_bound = workers, index, as_bound
        self._owners: dict[int, int] = {}  # worker by request

    def plan(self, works: Sequence[RoutedRequest]) -> dict[int, int]:
        """The worker of each request.

        Args:
            works: longest first.
        """
        orders = [list(works)]
        if len(works) <= MAX_SWAPPED:  # the exchange may end at another place from another order
            places = {kind: place for place, kind in enumerate({work.kind: 0 for work in works})}
            orders.append(sorted(works, key=lambda work: places[work.kind]))
            rng = random.Random(len(works))  # always the same orders
            orders += [rng.sample(works, len(works)) for _ in range(MAX_SWAPPED // len(works))]
        _, plan = min(map(self._planned, orders), key=lambda option: option[0])
        return plan

    def _planned(self, works: Sequence[RoutedRequest]) -> tuple[float, dict[int, int]]:
        """The end of the last request, and the worker of each, if they are bound in this order."""
        for work in works:
            target = min(
                self._index.look(work.kind),
                key=lambda worker: (worker.finish_s([self._as_bound(work, worker)]), worker.id),
            )
            target.bound[work.request] = self._as_bound(work, target)
            self._owners[work.request] = target.id
            self._index.put(target)
        if len(works) <= MAX_SWAPPED and len(self._workers) > 1:
            self._exchange({work.request for work in works})
        plan = {work.request: self._owners.pop(work.request) for work in works}
        last_s = max(self._workers[number].finish_s() for number in set(plan.values()))
        for request, number in plan.items():
            del self._workers[number].bound[request]
            self._index.put(self._workers[number])
        return last_s, plan

    def _exchange(self, movable: set[int]) -> None:
        """Move and exchange requests while that makes the last end of all earlier."""
        touched = {self._owners[request] for request in movable}
        near = {*touched, *(worker.id for worker in self._index.look(None))}
        workers = [
            self._workers[number] for number in sorted(near) if self._workers[number].is_open
        ]
        for _ in range(MAX_SWAPPED):
            last = max(workers, key=lambda worker: (worker.finish_s(), -worker.id))
            if not self._improved(last, workers, movable):
                return

    def _improved(self, last: WorkerLoad, workers: Sequence[WorkerLoad], movable: set[int]) -> bool:
        latest_s = last.finish_s() * (1 - 1e-9)
        for entry in [bound for bound in last.bound.values() if bound.work.request in movable]:
            for receiver in workers:
                if receiver is last:
                    continue
                incoming = self._as_bound(entry.work, receiver)
                swaps = [b for b in receiver.bound.values() if b.work.request in movable]
                for swapped in (None, *swaps):
                    back = [] if swapped is None else [self._as_bound(swapped.work, last)]
                    without = None if swapped is None else swapped.work.request
                    if receiver.finish_s([incoming], without) >= latest_s:
                        continue
                    if last.finish_s(back, entry.work.request) >= latest_s:
                        continue
                    self._move(entry.work, receiver)
                    if swapped is not None:
                        self._move(swapped.work, last)
                    return True
        return False

    def _move(self, work: RoutedRequest, to: WorkerLoad) -> None:
        before = self._workers[self._owners[work.request]]
        del before.bound[work.request]
        to.bound[work.request] = self._as_bound(work, to)
        self._owners[work.request] = to.id
        self._index.put(before)
        self._index.put(to)
