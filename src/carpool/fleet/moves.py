"""The policy of moves: which running requests go on in another worker. No processes, no clock.

A request that moves is given up between two steps and replayed from its journal elsewhere. Reasons:

    drain     its worker is to end: all that it has moves
    priority  a request of higher priority waits, no worker has room for it, and the router would
              serve it first: the request of lowest priority is paused, and waits in turn
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from carpool.fleet.router import Router
from carpool.fleet.worker_load import Bound, RoutedRequest
from carpool.worker.watchdog import INTERVAL_S

MAX_PAUSES = 3  # of one request
MIN_LEFT_S = 1.0  # work that a paused request has left, at least: a pause takes some 0.2 s


@dataclass(frozen=True, slots=True)
class Move:
    """A request is to be given up by its worker."""

    request: int
    worker: int
    to: int | None  # None: where the router says
    why: Literal["drain", "priority"]


def left(bound: Bound) -> RoutedRequest:
    """The rest of a request, as one that comes now."""
    return replace(bound.work, steps=max(1, ceil(bound.steps_left)))


class Moves:
    """Chooses moves for one router, within bounds.

    Args:
        can_move: whether a request, by its number, would go on elsewhere where it was.
        model_of: the digest of the model that a worker, by its number, has; requests go on only
            where it is the same.
    """

    def __init__(
        self,
        router: Router,
        can_move: Callable[[int], bool],
        model_of: Callable[[int], str] = lambda worker: "",
    ) -> None:
        self._router, self._can_move, self._model_of = router, can_move, model_of
        self._pauses: Counter[int] = Counter()  # by request
        self._paused_s = -inf

    def ended(self, request: int) -> None:
        del self._pauses[request]

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
        requests = [number for number in workers[worker_id].bound if self._can_move(number)]
        return [Move(number, worker_id, to, "drain") for number in requests]

    def pause(self, now_s: float) -> Move | None:
        """The request that makes room for one of higher priority, if any does.

        Args:
            now_s: on any clock; pauses are a report of a worker apart on it.
        """
        urgent, workers = self._router.queue.first, self._router.workers
        if urgent is None or now_s < self._paused_s + INTERVAL_S:
            return None
        if len({self._model_of(number) for number in workers}) > 1:
            return None  # it might start over
        victims = [
            (bound.work.priority, -bound.left_s, request, worker.id)
            for worker in workers.values()
            if worker.is_open
            for request, bound in worker.bound.items()
            if bound.work.priority < urgent.priority
            and bound.left_s > MIN_LEFT_S
            and self._pauses[request] < MAX_PAUSES
            and self._can_move(request)
            and self._router.queue.goes_before(urgent, left(bound))
        ]
        if not victims:
            return None
        *_, request, worker_id = min(victims)
        self._paused_s = now_s
        self._pauses[request] += 1
        return Move(request, worker_id, None, "priority")
