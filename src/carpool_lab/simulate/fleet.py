"""The loop of a simulation: requests arrive, a router binds them to workers, workers take turns.

The router has the same information as in a server: arrivals, ends, costs of steps, and once a
second the remaining steps of each worker's requests. Requests of a stopped worker run again. With
`moves`, requests are paused between forwards for other requests, as in a server.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from msgspec.structs import asdict

from carpool.fleet.moves import Move, Moves, left
from carpool.fleet.router import Router
from carpool.fleet.worker_load import RoutedRequest, StepTable, WorkerLoad
from carpool.schedule.sweep import step_seconds
from carpool_lab.simulate.simulator import Result, SimulatedRequest, Worker

REPORT_S = 1.0  # interval of a worker's reports


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a fleet: a worker leaves, or a new one replaces it."""

    at_s: float
    worker: int
    make: Callable[[], Worker] | None = None  # makes the new worker; None: the worker leaves


class _Device:
    """A worker of the fleet: the time of its next turn, and the requests bound to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.next_s = inf
        self.is_running = False  # a forward is running
        self.reported_s = -inf
        self.ended = 0  # ended requests that the router knows
        self.requests: dict[int, SimulatedRequest] = {}  # by number in the fleet


def simulate(
    requests: Iterable[SimulatedRequest],
    workers: Sequence[Worker],
    router: Router | None = None,
    *,
    clients: int | None = None,
    changes: Sequence[Change] = (),
    moves: bool = False,
) -> Result:
    """Simulate arrivals; returns every request and forward.

    Args:
        requests: in order of arrival, with ascending numbers; may be a generator.
        workers: one or several devices, each with its own policy.
        router: binds requests to workers; default: the server's.
        clients: number of clients of a closed loop: each sends its next request after an answer,
            which sets the arrival. None: requests have their own arrival times.
        changes: changes of workers, in order of time.
        moves: running requests may move to other workers; see `carpool.fleet.moves`.
    """
    if router is None:
        router = Router(is_choice=len(workers) > 1)
    fleet = _Fleet(workers, router, moves=moves)
    return fleet.run(requests, clients, list(changes))


class _Fleet:
    def __init__(self, workers: Sequence[Worker], router: Router, *, moves: bool) -> None:
        self._devices = [_Device(worker) for worker in workers]
        self._router = router
        self._moves = Moves(router, self._can_move) if moves else None
        self._leaving: dict[int, Move] = {}  # by request: pending moves
        self._requests: list[SimulatedRequest] = []  # by number, from 1
        self._turns: list[tuple[float, int]] = []  # a heap; some entries are outdated
        self._asking: list[float] = []  # heap of clients' next request times
        self._forwards = self._rows = 0  # totals of workers that left
        for number, worker in enumerate(workers):
            router.add_worker(_load(number, worker))

    def run(
        self, requests: Iterable[SimulatedRequest], clients: int | None, changes: list[Change]
    ) -> Result:
        coming = iter(requests)
        simulated = next(coming, None)
        self._asking = [0.0] * (clients or 0)
        changes.reverse()

        def due_s() -> float:
            if simulated is None:
                return inf
            if clients is None:
                return simulated.waiting.arrived_s
            return self._asking[0] if self._asking else inf

        while True:
            while self._turns and self._devices[self._turns[0][1]].next_s != self._turns[0][0]:
                heapq.heappop(self._turns)
            turn_s = self._turns[0][0] if self._turns else inf
            now_s = min(turn_s, due_s())
            if now_s == inf and not self._router.waiting:
                break
            if changes and changes[-1].at_s <= now_s:
                now_s = changes[-1].at_s
            due = set[int]()
            while changes and changes[-1].at_s <= now_s:
                self._change(changes.pop())
            while simulated is not None and due_s() <= now_s:
                if clients is not None:
                    simulated.arrive(heapq.heappop(self._asking))
                self._requests.append(simulated)
                simulated.number = len(self._requests)
                self._router.hold(_routed(simulated, len(self._requests)))
                simulated = next(coming, None)
            while self._turns and self._turns[0][0] <= now_s:
                at_s, number = heapq.heappop(self._turns)
                if self._devices[number].next_s == at_s:
                    due.add(number)
                    self._report(number, now_s)
            for assignment in self._router.assign(now_s):
                device = self._devices[assignment.worker]
                device.requests[assignment.request] = self._requests[assignment.request - 1]
                device.worker.put(device.requests[assignment.request])
                if not device.is_running:
                    due.add(assignment.worker)
            held_s = self._router.held_s / len(self._devices)
            for number in sorted(due):
                self._turn(number, now_s, held_s, has_clients=clients is not None)
        results = [device.worker.result for device in self._devices]
        return Result(
            self._requests,
            max((request.ended_s for request in self._requests), default=0.0),
            self._forwards + sum(result.forwards for result in results),
            self._rows + sum(result.rows for result in results),
            [batch for result in results for batch in result.batches],
        )

    def _turn(self, number: int, now_s: float, held_s: float, *, has_clients: bool) -> None:
        device = self._devices[number]
        worker = device.worker
        worker.held_s = held_s
        before = len(worker.result.requests)
        device.is_running, device.next_s = worker.turn(now_s)
        if device.next_s < inf:
            heapq.heappush(self._turns, (device.next_s, number))
        if has_clients:
            for request in worker.result.requests[before:]:
                heapq.heappush(self._asking, request.ended_s)

    def _report(self, number: int, now_s: float) -> None:
        """Report ended requests to the router, and periodically the remaining steps."""
        device = self._devices[number]
        device.is_running = False
        ended = device.worker.result.requests
        for simulated in ended[device.ended :]:
            del device.requests[simulated.number]
            self._router.drop(simulated.number)
            self._leaving.pop(simulated.number, None)
        device.ended = len(ended)
        if self._leaving:
            for request in [request for request in self._leaving if request in device.requests]:
                self._give_up(request, device, now_s)
        has_choice = len(self._devices) > 1 or self._moves is not None
        if has_choice and now_s >= device.reported_s + REPORT_S:
            device.reported_s = now_s
            if device.worker.beliefs is not None:
                streams = bool(device.worker.beliefs.streams)
                self._router.learned(number, _tables(device.worker), shares_sweeps=streams)
            self._router.progressed(
                number,
                {request: _left(simulated) for request, simulated in device.requests.items()},
                now_s,
            )
            if self._moves is not None and (move := self._moves.pause(now_s)) is not None:
                self._leaving[move.request] = move
                if move.worker == number:
                    self._give_up(move.request, device, now_s)

    def _can_move(self, request: int) -> bool:
        owner = self._router.owner(request)
        is_there = owner is not None and request in self._devices[owner.id].requests
        return is_there and request not in self._leaving

    def _give_up(self, request: int, device: _Device, now_s: float) -> None:
        """Remove a request from its worker; it waits."""
        move, simulated = self._leaving.pop(request), device.requests.pop(request)
        device.worker.take(simulated)
        bound = self._router.workers[move.worker].bound[request]
        self._router.drop(request)
        self._router.hold(left(bound))

    def _change(self, change: Change) -> None:
        device = self._devices[change.worker]
        if change.make is not None:
            self._devices[change.worker] = device = _Device(change.make())
            self._router.add_worker(_load(change.worker, device.worker))
            return
        self._forwards += device.worker.result.forwards
        self._rows += device.worker.result.rows
        for work in self._router.remove_worker(change.worker):
            self._leaving.pop(work.request, None)
            simulated = self._requests[work.request - 1]
            simulated.at = simulated.calls_done = 0
            simulated.ended_s = inf
            self._router.hold(work)
        device.next_s, device.requests = inf, {}
        device.is_running = True  # it takes no more turns


def _routed(simulated: SimulatedRequest, number: int) -> RoutedRequest:
    """A simulated request as the router sees it."""
    denoise = next(stage for stage in simulated.stages if stage.phase == "denoise")
    view = asdict(simulated.waiting) | {"request": number}
    return RoutedRequest(**view, kind=denoise.kind, steps=denoise.count)


def _left(simulated: SimulatedRequest) -> float:
    """The remaining denoising steps of a request."""
    return float(
        sum(
            stage.count - (simulated.calls_done if place == simulated.at else 0)
            for place, stage in enumerate(simulated.stages)
            if place >= simulated.at and stage.phase == "denoise"
        )
    )


def _load(number: int, worker: Worker) -> WorkerLoad:
    return WorkerLoad(number, _tables(worker), shares_sweeps=bool(worker.costs.streams))


def _tables(worker: Worker) -> dict[Hashable, StepTable]:
    """Seconds of denoising steps, by number of requests in them."""
    costs = worker.costs if worker.beliefs is None else worker.beliefs
    max_rows, max_requests = worker.max_rows["denoise"], WorkerLoad(0).max_requests
    return {
        kind: tuple(step_seconds(costs, kind, 1, most_rows=max_rows, most_running=max_requests))
        for kind, curve in costs
        if kind.name == "denoise" and not curve.is_empty
    }
