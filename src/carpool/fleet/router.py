"""The router: chooses the worker of each waiting request, or that it goes on waiting.

Requests are bound late: to a worker that would serve them at once, so that none queues behind a
slow worker. A request is bound where the ends of all requests move least in sum
(`worker_load.extra_s`): together with its kind where fusing pays, else where the least is to be
done. Where a full worker is the best place, as the others are slow, it waits for that. The order is
that of `waiting_requests.py`; of requests that come together to an idle fleet the longest go
first, so that the last of them ends early.

A choice looks at the workers with the least to do, and at those with the least to do that run the
same kind: `LOOKED_AT` of each. Of equals, the worker wins that got its last request first, as its
requests are nearer to their end than was reported; then ids decide. No clock: callers say the time.

Source: longest first: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied
Mathematics 17(2), 1969.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from carpool.fleet.waiting_requests import WaitingRequests
from carpool.fleet.worker_load import (
    UNKNOWN,
    Bound,
    RoutedRequest,
    StepTable,
    WorkerLoad,
    extra_s,
    paying_width,
)
from carpool.schedule.arrivals import MAX_GROWTH
from carpool.schedule.continuous import INTERRUPT_RATIO
from carpool.schedule.fair_shares import FairShares

LOOKED_AT = 8  # workers, and as many that run the same kind
AHEAD_SHARE = 0.25  # of what a worker runs together, or of its part of the line: bound ahead


@dataclass(frozen=True, slots=True)
class Binding:
    """A request goes to a worker."""

    request: int
    worker: int


class Router:
    """Holds requests, and binds them to workers.

    Args:
        min_gain: as in the engines' settings.
        fair_share: weights of tenants; None: not fair.
        is_choice: workers are chosen. A single worker that stays the only one gets every request at
            once: its engine knows more of the queue than a router can.
    """

    def __init__(
        self,
        *,
        min_gain: float = 0.05,
        fair_share: Mapping[str, float] | None = None,
        is_choice: bool = True,
    ) -> None:
        self._min_gain, self._is_choice = min_gain, is_choice
        shares = None if fair_share is None else FairShares(fair_share)
        self.queue = WaitingRequests(self._work_s, shares)
        self.workers: dict[int, WorkerLoad] = {}
        self._open: list[tuple[float, int]] = []  # loads and ids of those that take requests
        self._owners: dict[int, int] = {}  # worker by request that is bound
        self._tables: dict[Hashable, StepTable] = {}  # of any worker, the newest that was said
        self._bindings = 0  # so far
        self._now_s = 0.0  # when it was last asked

    # What happens

    def add_worker(self, worker: WorkerLoad) -> None:
        self.workers[worker.id] = worker
        self.learned(worker.id, worker.tables, shares_sweeps=worker.shares_sweeps)

    def learned(
        self,
        worker_id: int,
        tables: Mapping[Hashable, StepTable],
        *,
        shares_sweeps: bool = False,
    ) -> None:
        """A worker says what steps take."""
        worker = self.workers[worker_id]
        worker.shares_sweeps = shares_sweeps
        worker.tables = tables
        self._tables.update(tables)
        for bound in worker.bound.values():
            bound.table = self.table(worker, bound.work.kind)
        self._weigh(worker)

    def remove_worker(self, worker_id: int) -> list[RoutedRequest]:
        """A worker is gone; returns the requests that were bound to it."""
        self.open(worker_id, is_open=False)
        worker = self.workers.pop(worker_id)
        for request in worker.bound:
            del self._owners[request]
        return [bound.work for bound in worker.bound.values()]

    def open(self, worker_id: int, is_open: bool) -> None:
        """Say whether a worker takes requests."""
        self.workers[worker_id].is_open = is_open
        self._weigh(self.workers[worker_id])

    def _weigh(self, worker: WorkerLoad) -> None:
        """Put a worker that has changed in its place among those that take requests."""
        place = bisect_left(self._open, entry := (worker.load_s, worker.id))
        if self._open[place : place + 1] == [entry]:
            del self._open[place]
        worker.weigh()
        if worker.is_open:
            insort(self._open, (worker.load_s, worker.id))

    def hold(self, work: RoutedRequest) -> None:
        """A request waits."""
        self.queue.add(work)

    def drop(self, request: int) -> bool:
        """A request has ended, or waits no more; returns whether it was known."""
        if request in self.queue:
            self.queue.remove(request)
            return True
        owner = self._owners.pop(request, None)
        if owner is None:
            return False
        worker = self.workers[owner]
        worker.told_s += worker.bound.pop(request).left_s  # a part of what it did since
        self._weigh(worker)
        return True

    def progressed(self, worker_id: int, steps_left: Mapping[int, float], now_s: float) -> None:
        """A worker says how many steps its requests have left."""
        worker = self.workers[worker_id]
        worker.told_s = now_s
        for request, steps in steps_left.items():
            if (bound := worker.bound.get(request)) is not None:
                bound.steps_left = steps
        self._weigh(worker)

    # What is decided

    @property
    def waiting(self) -> list[RoutedRequest]:
        """The held requests, in the order in which they came."""
        return list(self.queue)

    @property
    def held_s(self) -> float:
        """Predicted work of what is held, each step alone; a guess where nothing is known."""
        work = self.queue.steps.items()
        return sum(steps * self._tables.get(kind, UNKNOWN)[0] for kind, steps in work)

    def held_for_s(self) -> float:
        """Predicted seconds until all that is held could have begun, as wide as is worth it.

        Nobody is refused for a guess: kinds that no worker has told of count nothing.
        """
        if not self._open:
            return inf
        work = ((steps, self._tables.get(kind)) for kind, steps in self.queue.steps.items())
        return sum(steps * _row_s(table) for steps, table in work if table) / len(self._open)

    def part_s(self) -> float:
        """A worker's part of `held_s`."""
        return self.held_s / max(1, len(self._open))

    def needed_s(self, work: RoutedRequest) -> float | None:
        """Predicted seconds until a request that comes now has ended; None: nothing is known."""
        return self.held_for_s() + self._work_s(work) if work.kind in self._tables else None

    def assign(self, now_s: float) -> list[Binding]:
        """Bind what is to be bound now.

        Args:
            now_s: on the clock of `arrived_s` and `deadline_s`.
        """
        self._now_s = now_s
        if not self.queue or not self._open:
            return []
        if not self._is_choice:
            [worker] = self.workers.values()
            return [self.bind(work, worker) for work in self.waiting]
        self.queue.count_shares(
            bound.work for worker in self.workers.values() for bound in worker.bound.values()
        )
        bindings: list[Binding] = []
        places = sum(self.workers[number].max_requests for _, number in self._open)
        if not self._owners and 1 < len(self.queue) <= places:
            longest = sorted(self.queue, key=self._longest, reverse=True)
            choices = ((work, self._choose(work)) for work in longest)
            bindings += [self.bind(work, worker) for work, worker in choices if worker]
        while (binding := self._next(now_s)) is not None:
            bindings.append(self.bind(*binding))
        return bindings

    def owner(self, request: int) -> WorkerLoad | None:
        """The worker that a request is bound to."""
        return self.workers.get(self._owners.get(request, -1))

    def bind_to(self, request: int, worker_id: int) -> bool:
        """Bind a request that is held to this worker, if that is still open."""
        worker = self.workers.get(worker_id)
        if worker is None or not worker.is_open or request not in self.queue:
            return False
        self.bind(self.queue[request], worker)
        return True

    def table(self, worker: WorkerLoad, kind: Hashable) -> StepTable:
        """Seconds a step: the worker's own, or those of any other, or a guess."""
        return worker.tables.get(kind) or self._tables.get(kind) or UNKNOWN

    def _next(self, now_s: float) -> tuple[RoutedRequest, WorkerLoad] | None:
        """The first request of the order that can be bound, and its worker."""
        for work in self.queue.firsts(now_s, LOOKED_AT):
            worker = self._choose(work)
            if worker is not None:
                return work, worker
        return None

    def _look(self, kind: Hashable) -> Sequence[WorkerLoad]:
        """The workers that a choice looks at, each once."""
        workers = self.workers
        if len(self._open) <= 2 * LOOKED_AT:
            return [workers[number] for _, number in self._open]
        peers = (number for _, number in self._open if kind in workers[number].kinds)
        chosen = [*(number for _, number in self._open[:LOOKED_AT]), *islice(peers, LOOKED_AT)]
        return [workers[number] for number in dict.fromkeys(chosen)]

    def _choose(self, work: RoutedRequest) -> WorkerLoad | None:
        """The worker that gets a request now; None where it is to wait."""
        workers = len(self._open)
        backlog = (len(self._owners) + len(self.queue)) // workers
        behind = len(self.queue) - 1
        target, best_key, is_free = None, (inf, inf, 0, 0), False
        for worker in self._look(work.kind):
            table = self.table(worker, work.kind)
            seconds = extra_s(work, worker, table, self._now_s)
            has_room = self._has_room(work, worker, table, backlog)
            if not has_room:  # it would wait there, and those behind it would wait for it
                seconds += behind * work.steps * table[0] / workers
            key = seconds, worker.load_s, worker.bound_at, worker.id
            if key < best_key:
                target, best_key, is_free = worker, key, has_room
        return target if is_free else None

    def _has_room(
        self, work: RoutedRequest, worker: WorkerLoad, table: StepTable, backlog: int
    ) -> bool:
        """Whether a worker would serve a request at once."""
        if len(worker.bound) >= worker.max_requests:
            return False
        if worker.shares_sweeps:
            return True  # whoever joins the sweep makes it little longer
        slots = self._slots(table, backlog, len(self.queue) // len(self._open))
        if len(worker.bound) < slots:
            return True
        long_s = work.steps * table[0] / INTERRUPT_RATIO  # whoever has more left is interrupted
        ahead = sum(
            [bound.steps_left * bound.table[0] <= long_s for bound in worker.bound.values()]
        )
        return ahead < slots

    def _slots(self, table: StepTable, backlog: int, waiting: int) -> int:
        """The number of requests that a worker has at the same time.

        Some are ahead, to be encoded while others run: the more the longer the line is, to be
        encoded in few forwards, but not so many that a line's last ones wait for one worker.

        Args:
            backlog: requests there are for each worker.
            waiting: of them, those that are held.
        """
        width = paying_width(table, MAX_GROWTH * min(backlog, 1024), self._min_gain)
        return width + max(1, min(width, int(AHEAD_SHARE * max(width, waiting))))

    # Bookkeeping

    def bind(self, work: RoutedRequest, worker: WorkerLoad) -> Binding:
        """A request that is held goes to a worker."""
        self.queue.remove(work.request)
        if not worker.bound:  # it has done nothing since
            worker.told_s = self._now_s
        worker.bound[work.request] = Bound(work, work.steps, self.table(worker, work.kind))
        self._owners[work.request] = worker.id
        self._bindings += 1
        worker.bound_at = self._bindings
        self._weigh(worker)
        self.queue.charge(work)
        return Binding(work.request, worker.id)

    def _longest(self, work: RoutedRequest) -> tuple[int, float]:
        return work.priority, self._work_s(work)

    def _work_s(self, work: RoutedRequest) -> float:
        return work.steps * self._tables.get(work.kind, UNKNOWN)[0]


def _row_s(table: StepTable) -> float:
    """Seconds of a request's step in the forwards that serve most of them a second."""
    return min(seconds / rows for rows, seconds in enumerate(table, 1))
