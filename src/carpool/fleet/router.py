"""The router: chooses a worker for each waiting request, or keeps the request waiting.

Requests are bound late: to a worker that would serve them at once, so that none queues behind a
slow worker. A request goes where it increases the total completion time least
(`worker_load.extra_s`): to requests of its kind if fusing pays, else to the least loaded worker.
If a busy worker is the best place, because the others are slow, the request waits for it.
`waiting_requests.py` has the order; when several requests arrive at an idle fleet, the longest go
first, so that the last one ends early.

A choice considers the least loaded workers, and the least loaded ones that run the same kind:
`LOOKED_AT` of each. Among equals, the worker with the oldest last binding wins, as its requests
have progressed most since its report; then ids decide. No clock: callers pass the time.

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

LOOKED_AT = 8  # least loaded workers, and as many with the same kind
AHEAD_SHARE = 0.25  # bound ahead, as a share of a worker's width, or of its queue share


@dataclass(frozen=True, slots=True)
class Binding:
    """The binding of a request to a worker."""

    request: int
    worker: int


class Router:
    """Holds requests, and binds them to workers.

    Args:
        min_gain: as in the engines' settings.
        fair_share: weights of tenants; None: no fair shares.
        is_choice: the router chooses workers. A single fixed worker gets every request at once: its
            engine knows more about its queue than a router.
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
        self._open: list[tuple[float, int]] = []  # loads and ids of open workers, sorted
        self._owners: dict[int, int] = {}  # worker ids by bound request
        self._tables: dict[Hashable, StepTable] = {}  # latest report of any worker
        self._bindings = 0  # number of bindings so far
        self._now_s = 0.0  # time of the last `assign`

    # Events

    def add_worker(self, worker: WorkerLoad) -> None:
        self.workers[worker.id] = worker
        self.learned(worker.id, worker.tables, shares_sweeps=worker.shares_sweeps)

    def learned(
        self, worker_id: int, tables: Mapping[Hashable, StepTable], *, shares_sweeps: bool = False
    ) -> None:
        """Update a worker's seconds of steps."""
        worker = self.workers[worker_id]
        worker.shares_sweeps, worker.tables = shares_sweeps, tables
        self._tables.update(tables)
        for bound in worker.bound.values():
            bound.table = self.table(worker, bound.work.kind)
        self._weigh(worker)

    def remove_worker(self, worker_id: int) -> list[RoutedRequest]:
        """Remove a worker; returns its bound requests."""
        self.open(worker_id, is_open=False)
        worker = self.workers.pop(worker_id)
        for request in worker.bound:
            del self._owners[request]
        return [bound.work for bound in worker.bound.values()]

    def open(self, worker_id: int, is_open: bool) -> None:
        """Set whether a worker accepts requests."""
        self.workers[worker_id].is_open = is_open
        self._weigh(self.workers[worker_id])

    def _weigh(self, worker: WorkerLoad) -> None:
        """Re-sort a changed worker among the open workers."""
        place = bisect_left(self._open, entry := (worker.load_s, worker.id))
        if self._open[place : place + 1] == [entry]:
            del self._open[place]
        worker.weigh()
        if worker.is_open:
            insort(self._open, (worker.load_s, worker.id))

    def hold(self, work: RoutedRequest) -> None:
        """Add a waiting request."""
        self.queue.add(work)

    def drop(self, request: int) -> bool:
        """Remove a request that ended or waits no more; returns whether it was known."""
        if request in self.queue:
            self.queue.remove(request)
            return True
        owner = self._owners.pop(request, None)
        if owner is None:
            return False
        worker = self.workers[owner]
        worker.told_s += worker.bound.pop(request).left_s  # part of the work since its last report
        self._weigh(worker)
        return True

    def progressed(self, worker_id: int, steps_left: Mapping[int, float], now_s: float) -> None:
        """Update the remaining steps of a worker's requests."""
        worker = self.workers[worker_id]
        worker.told_s = now_s
        for request, steps in steps_left.items():
            if (bound := worker.bound.get(request)) is not None:
                bound.steps_left = steps
        self._weigh(worker)

    # Decisions

    @property
    def waiting(self) -> list[RoutedRequest]:
        """The waiting requests, in order of arrival."""
        return list(self.queue)

    @property
    def held_s(self) -> float:
        """Predicted work of the waiting requests, each step alone; a guess for unknown kinds."""
        work = self.queue.steps.items()
        return sum(steps * self._tables.get(kind, UNKNOWN)[0] for kind, steps in work)

    def held_for_s(self) -> float:
        """Predicted seconds until all waiting requests could have started, at the best width.

        A guess must not refuse a request: kinds without any report count zero.
        """
        if not self._open:
            return inf
        work = ((steps, self._tables.get(kind)) for kind, steps in self.queue.steps.items())
        return sum(steps * _row_s(table) for steps, table in work if table) / len(self._open)

    def part_s(self) -> float:
        """One worker's share of `held_s`."""
        return self.held_s / max(1, len(self._open))

    def needed_s(self, work: RoutedRequest) -> float | None:
        """Predicted seconds until the end of a request that arrives now; None: unknown."""
        return self.held_for_s() + self._work_s(work) if work.kind in self._tables else None

    def assign(self, now_s: float) -> list[Binding]:
        """Bind the requests that can be bound now.

        Args:
            now_s: on the clock of `arrived_s` and `deadline_s`.
        """
        self._now_s = now_s
        if not self.queue or not self._open:
            return []
        if not self._is_choice:
            [worker] = self.workers.values()
            return [self.bind(work, worker) for work in self.waiting]
        loads = self.workers.values()
        self.queue.count_shares(bound.work for load in loads for bound in load.bound.values())
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
        """Bind a waiting request to this worker, if it is still open."""
        worker = self.workers.get(worker_id)
        if worker is None or not worker.is_open or request not in self.queue:
            return False
        self.bind(self.queue[request], worker)
        return True

    def step_s(self, kind: Hashable) -> float:
        """Predicted seconds of a step alone; a guess for unknown kinds."""
        return self._tables.get(kind, UNKNOWN)[0]

    def table(self, worker: WorkerLoad, kind: Hashable) -> StepTable:
        """Seconds a step: the worker's own, else any other worker's, else a guess."""
        return worker.tables.get(kind) or self._tables.get(kind) or UNKNOWN

    def _next(self, now_s: float) -> tuple[RoutedRequest, WorkerLoad] | None:
        """The first request in order that can be bound, and its worker."""
        for work in self.queue.firsts(now_s, LOOKED_AT):
            if (worker := self._choose(work)) is not None:
                return work, worker
        return None

    def _look(self, kind: Hashable) -> Sequence[WorkerLoad]:
        """The workers considered for a choice, each once."""
        workers = self.workers
        if len(self._open) <= 2 * LOOKED_AT:
            return [workers[number] for _, number in self._open]
        peers = (number for _, number in self._open if kind in workers[number].kinds)
        chosen = [*(number for _, number in self._open[:LOOKED_AT]), *islice(peers, LOOKED_AT)]
        return [workers[number] for number in dict.fromkeys(chosen)]

    def _choose(self, work: RoutedRequest) -> WorkerLoad | None:
        """The worker that gets a request now; None: the request waits."""
        workers = len(self._open)
        backlog = (len(self._owners) + len(self.queue)) // workers
        behind = len(self.queue) - 1
        target, best_key, is_free = None, (inf, inf, 0, 0), False
        for worker in self._look(work.kind):
            table = self.table(worker, work.kind)
            seconds = extra_s(work, worker, table, self._now_s)
            has_room = self._has_room(work, worker, table, backlog)
            if not has_room:  # it would wait there, and block the requests behind it
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
            return True  # one more request slows the sweep down little
        slots = self._slots(table, backlog, len(self.queue) // len(self._open))
        if len(worker.bound) < slots:
            return True
        long_s = work.steps * table[0] / INTERRUPT_RATIO  # longer requests would be interrupted
        lengths_s = [bound.steps_left * bound.table[0] for bound in worker.bound.values()]
        return sum([length_s <= long_s for length_s in lengths_s]) < slots

    def _slots(self, table: StepTable, backlog: int, waiting: int) -> int:
        """The number of requests that a worker may hold at the same time.

        Some are bound ahead, to be encoded while others run: more for a longer queue, so that they
        are encoded in few forwards, but not so many that the last ones wait for one worker.

        Args:
            backlog: requests in flight per worker.
            waiting: waiting requests per worker.
        """
        width = paying_width(table, MAX_GROWTH * min(backlog, 1024), self._min_gain)
        return width + max(1, min(width, int(AHEAD_SHARE * max(width, waiting))))

    # Bookkeeping

    def bind(self, work: RoutedRequest, worker: WorkerLoad) -> Binding:
        """Bind a waiting request to a worker."""
        self.queue.remove(work.request)
        if not worker.bound:  # it was idle since its last report
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
        return work.steps * self.step_s(work.kind)


def _row_s(table: StepTable) -> float:
    """Seconds of a request's step at the width with the highest throughput."""
    return min(seconds / rows for rows, seconds in enumerate(table, 1))
