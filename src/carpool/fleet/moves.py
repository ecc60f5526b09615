"""The policy of moves: running requests that continue on another worker. No processes, no clock.

A moving request is released between two steps and replayed from its journal elsewhere. Reasons:

    drain     its worker will end: all its requests move
    priority  a request of higher priority waits, no worker has room for it, and the router would
              serve it first: the request of lowest priority is paused, and waits in turn
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from msgspec.structs import replace

from carpool.fleet.router import Router
from carpool.fleet.worker_load import Bound, RoutedRequest
from carpool.worker.watchdog import INTERVAL_S

MAX_PAUSES = 3  # pauses of one request
MIN_LEFT_S = 1.0  # work of a paused request, at least: a pause costs some 0.2 s


@dataclass(frozen=True, slots=True)
class Move:
    """An order to a worker to release a request."""

    request: int
    worker: int
    to: int | None  # None: the router chooses
    why: Literal["drain", "priority"]


def left(bound: Bound) -> RoutedRequest:
    """The remaining work of a request, as a new request."""
    return replace(bound.work, steps=max(1, ceil(bound.steps_left)))


class Moves:
    """Chooses moves for one router, within bounds.

    Args:
        can_move: whether a request, by number, could resume on another worker without loss.
        model_of: the digest of a worker's model, by the worker's number; requests resume only on
            an equal model.
    """

    def __init__(
        self,
        router: Router,
        can_move: Callable[[int], bool],
        model_of: Callable[[int], str] = lambda worker: "",
    ) -> None:
        self._router, self._can_move, self._model_of = router, can_move, model_of
        self._pauses: Counter[int] = Counter()  # pauses by request
        self._paused_s = -inf

    def ended(self, request: int) -> None:
        del self._pauses[request]

    def drain(self, worker_id: int) -> list[Move]:
        """The moves that drain a worker, if another worker has the same model."""
        workers, model = self._router.workers, self._model_of(worker_id)
        receivers = [load for load in workers.values() if load.is_open and load.id != worker_id]
        peers = [load for load in receivers if self._model_of(load.id) == model]
        if not peers:
            return []
        to = None
        if len(peers) < len(receivers):
            to = min(peers, key=lambda load: len(load.bound)).id
        requests = [number for number in workers[worker_id].bound if self._can_move(number)]
        return [Move(number, worker_id, to, "drain") for number in requests]

    def pause(self, now_s: float) -> Move | None:
        """The request to pause for one of higher priority, if any.

        Args:
            now_s: on any clock; pauses are at least one report interval apart.
        """
        urgent, workers = self._router.queue.first, self._router.workers
        if urgent is None or now_s < self._paused_s + INTERVAL_S:
            return None
        if len({self._model_of(number) for number in workers}) > 1:
            return None  # the paused request might start over
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
