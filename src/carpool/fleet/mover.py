"""Has running requests move between the workers of a pool, and remembers which did.

What is to move, `moves.py` says. A worker that is asked gives the request up at its next step, or
not at all: where its journal lacks more than that.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from carpool.fleet.load import RoutedRequest
from carpool.fleet.moves import Move, Moves, left
from carpool.fleet.router import Router
from carpool.types import Clock
from carpool.worker.journals import Journals

log = logging.getLogger("carpool")

KEPT = 1000  # requests whose moves are known


class Mover:
    """Moves the requests of one pool; on the event loop.

    Args:
        journals: of the requests; None: none can move.
        release: asks a worker, by its number, to give a request up.
        wall_clock: Unix time.
    """

    def __init__(
        self,
        router: Router,
        journals: Journals | None,
        release: Callable[[int, str], None],
        wall_clock: Clock = time.time,
    ) -> None:
        self._router, self._journals, self._release = router, journals, release
        self._wall_clock = wall_clock
        self._policy = Moves(router, self._can_move)
        self._names: dict[int, str] = {}  # ids of requests in flight, by number
        self._asked: dict[int, Move] = {}  # by request
        self._moves: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self.counts = dict[str, int]()  # of requests that were given up, by reason

    def began(self, request: int, request_id: str) -> None:
        """A request is in flight."""
        self._names[request] = request_id

    def ended(self, request: int) -> None:
        del self._names[request]
        self._asked.pop(request, None)
        self._policy.ended(request)

    def look(self, now_s: float) -> None:
        """Ask for what is worth it now. To be called about once a second and worker."""
        if self._journals is not None and (move := self._policy.choose(now_s)) is not None:
            self._ask(move)

    def drain(self, worker: int) -> None:
        """Have a worker give up all that others can go on with."""
        for move in self._policy.drain(worker) if self._journals is not None else ():
            self._ask(move)

    def released(self, work: RoutedRequest) -> tuple[RoutedRequest, int | None]:
        """A worker has given a request up.

        Returns:
            What is left of it, and the worker that is to have it; None: whichever.
        """
        move = self._asked.pop(work.request, None)
        owner = self._router.owner(work.request)
        if owner is not None:
            work = left(owner.bound[work.request])
        if move is None:
            return work, None
        self.counts[move.why] = self.counts.get(move.why, 0) + 1
        name = self._names[work.request]
        told = {"at": self._wall_clock(), "from": move.worker, "to": None, "why": move.why}
        self._moves.setdefault(name, []).append(told)
        self._moves.move_to_end(name)
        while len(self._moves) > KEPT:
            self._moves.popitem(last=False)
        return work, move.to

    def bound(self, request_id: str, worker: int) -> None:
        """A request was bound to a worker."""
        if moves := self._moves.get(request_id):
            last = moves[-1]
            if last["to"] is None:
                last["to"] = worker
                log.info(
                    "request %s moves from worker %d to %d (%s)",
                    request_id, last["from"] + 1, worker + 1, last["why"],
                )  # fmt: skip

    def moves_of(self, request_id: str) -> list[dict[str, Any]]:
        """When a request moved, from where to where, and why."""
        return list(self._moves.get(request_id, ()))

    def _can_move(self, request: int) -> bool:
        name = self._names.get(request)
        return name is not None and self._journals is not None and self._journals.is_whole(name)

    def _ask(self, move: Move) -> None:
        self._asked[move.request] = move
        self._release(move.worker, self._names[move.request])
