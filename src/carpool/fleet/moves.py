"""The policy of moves: which running requests go on in another worker. No processes, no clock.

A request that moves is given up between two steps and replayed from its journal elsewhere. Reasons:

    drain     its worker is to end: all that it has moves
    priority  a request of higher priority waits, no worker has room for it, and the router would
              serve it first: the request of lowest priority is paused, and waits in turn

Bounds: a request is paused `MAX_MOVES` times, a fleet `MOVES_PER_S` times a
second, and each look sees `LOOKED_AT` workers, in turn. Drains are not bounded.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from typing import Literal

from carpool.fleet.router import Router
from carpool.fleet.worker_load import Bound, RoutedRequest, WorkerLoad

MoveReason = Literal["drain", "priority"]

MAX_MOVES = 3  # moves of one request
MOVES_PER_S = 2.0  # moves of a fleet, on the average
MOVES_AT_ONCE = 4  # moves at once
LOOKED_AT = 8  # workers, at one look
MIN_LEFT_OF_COST = 3.0  # times what a move takes: the work that a paused request has left, at least
MOVE_S = 0.1  # giving a request up, sending it, starting it: until moves were measured
REPLAY_S = 0.004  # a step's part of a replay: the pipeline's own code, its answers unpacked
KEPT_MEASUREMENTS = 9  # moves, the last ones: their median counts


@dataclass(frozen=True, slots=True)
class Move:
    """A request is to be given up by its worker."""

    request: int
    worker: int
    to: int | None  # None: where the router says
    why: MoveReason


class MoveCost:
    """The cost of moving a request: medians of what was measured, a guess before that."""

    def __init__(self) -> None:
        self._moves_s: deque[float] = deque(maxlen=KEPT_MEASUREMENTS)
        self._replays_s: deque[float] = deque(maxlen=KEPT_MEASUREMENTS)  # for each step

    def moved(self, took_s: float) -> None:
        """A request went on `took_s` after its worker had given it up, its replay aside."""
        self._moves_s.append(max(0.0, took_s))

    def replayed(self, steps: int, took_s: float) -> None:
        """A replay of so many steps took so long."""
        if steps:
            self._replays_s.append(took_s / steps)

    @property
    def start_s(self) -> float:
        """Seconds of a move without its replay."""
        return median(self._moves_s or [MOVE_S])

    @property
    def replay_s(self) -> float:
        """Seconds of a replay for each step."""
        return median(self._replays_s or [REPLAY_S])

    def of(self, bound: Bound) -> float:
        """Seconds that moving a request takes."""
        return self.start_s + self.replay_s * replay_steps(bound)


def replay_steps(bound: Bound) -> float:
    """Steps of a request that its journal has."""
    return bound.work.replay_steps + max(0.0, bound.work.steps - bound.steps_left)


def left(bound: Bound) -> RoutedRequest:
    """The rest of a request, as one that comes now."""
    return replace(
        bound.work, steps=max(1, ceil(bound.steps_left)), replay_steps=replay_steps(bound)
    )


class Moves:
    """Chooses moves for one router, within bounds.

    Args:
        can_move: whether a request's journal is whole, so that it can go on elsewhere.
        model_of: what tells the model of a worker from those of others: files that are exchanged
            come into use with the next start of each. A request goes on with its model only.
    """

    def __init__(
        self,
        router: Router,
        can_move: Callable[[int], bool],
        model_of: Callable[[int], str] = lambda worker: "",
    ) -> None:
        self._router, self._can_move, self._model_of = router, can_move, model_of
        self.cost = MoveCost()
        self._moved: Counter[int] = Counter()  # by request
        self._allowed, self._at_s = float(MOVES_AT_ONCE), 0.0
        self._turn = 0  # of workers

    def ended(self, request: int) -> None:
        del self._moved[request]

    def drain(self, worker_id: int) -> list[Move]:
        """The moves that empty a worker that is to end, if another one has the same model."""
        workers = self._router.workers
        receivers = [
            worker for worker in workers.values() if worker.is_open and worker.id != worker_id
        ]
        peers = [
            worker for worker in receivers if self._model_of(worker.id) == self._model_of(worker_id)
        ]
        if not peers:
            return []
        to = (
            None
            if len(peers) == len(receivers)
            else min(peers, key=lambda worker: len(worker.bound)).id
        )
        names = [name for name in workers[worker_id].bound if self._can_move(name)]
        return [Move(name, worker_id, to, "drain") for name in names]

    def choose(self, now_s: float) -> Move | None:
        """The next move for priority, if there is one that is worth it.

        Args:
            now_s: on any clock; moves per second are counted on it.
        """
        self._allowed = min(MOVES_AT_ONCE, self._allowed + (now_s - self._at_s) * MOVES_PER_S)
        self._at_s = now_s
        if self._allowed < 1:
            return None
        move = self._for_priority() if self._router.queue else None
        if move is not None:
            self._allowed -= 1
            self._moved[move.request] += 1
        return move

    def _movable(self, worker: WorkerLoad) -> Iterator[Bound]:
        for name, bound in worker.bound.items():
            if self._moved[name] < MAX_MOVES and self._can_move(name):
                yield bound

    def _look(self) -> list[WorkerLoad]:
        """Some open workers, the next ones each time."""
        workers = [worker for worker in self._router.workers.values() if worker.is_open]
        first = self._turn % len(workers) if workers else 0
        self._turn = first + LOOKED_AT
        return [*workers[first:], *workers[:first]][:LOOKED_AT]

    def _for_priority(self) -> Move | None:
        urgent = self._router.queue.first
        if urgent is None or self._has_several_models():
            return None
        victims = [
            (bound.work.priority, -bound.left_s, bound.work.request, worker.id)
            for worker in self._look()
            for bound in self._movable(worker)
            if bound.work.priority < urgent.priority
            and bound.left_s > MIN_LEFT_OF_COST * self.cost.of(bound)
            and self._router.queue.goes_before(urgent, left(bound))
        ]
        if not victims:
            return None
        *_, request, worker_id = min(victims)
        return Move(request, worker_id, None, "priority")

    def _has_several_models(self) -> bool:
        return len({self._model_of(worker.id) for worker in self._router.workers.values()}) > 1
