"""Has running requests move between the workers of a pool, and remembers which did.

What is to move, `moves.py` says. A worker that is asked gives the request up at its next step, or
not at all: where its journal lacks more than that. What a move takes is measured: workers report
how long replays took and when they ended.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from carpool.fleet.moves import Move, Moves, left
from carpool.fleet.router import Router
from carpool.fleet.worker_load import RoutedRequest
from carpool.telemetry.activity import SeenMove
from carpool.worker import protocol
from carpool.worker.journals import Journals

log = logging.getLogger("carpool")

KEPT_REQUESTS = 1000  # requests whose moves are known
KEPT_MOVES = 256  # moves, until somebody asks


class Mover:
    """Moves the requests of one pool; on the event loop.

    Args:
        journals: of the requests; None: none can move.
        release: asks a worker, by its number, to give a request up.
        model_of: see `Moves`.
    """

    def __init__(
        self,
        router: Router,
        journals: Journals | None,
        release: Callable[[int, str], None],
        model_of: Callable[[int], str] = lambda worker: "",
    ) -> None:
        self._router, self._journals, self._release = router, journals, release
        self._policy = Moves(router, self._can_move, model_of)
        self._names: dict[int, str] = {}  # ids of requests in flight, by number
        self._asked: dict[int, Move] = {}  # by request
        self._moves: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self._news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=KEPT_MOVES)
        self._sent_s: dict[str, float] = {}  # requests that moved: when they were bound again
        self.counts = dict[str, int]()  # of requests that were given up, by reason

    def began(self, request: int, request_id: str) -> None:
        """A request is in flight."""
        self._names[request] = request_id

    def ended(self, request: int) -> None:
        self._sent_s.pop(self._names.pop(request), None)
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
        told = {"at": time.time(), "from": move.worker, "to": None, "why": move.why}
        self._moves.setdefault(name, []).append(told)
        self._moves.move_to_end(name)
        while len(self._moves) > KEPT_REQUESTS:
            self._moves.popitem(last=False)
        return work, move.to

    def bound(self, request_id: str, worker: int, now_s: float) -> None:
        """A request was bound to a worker."""
        if moves := self._moves.get(request_id):
            last = moves[-1]
            if last["to"] is None:
                last["to"] = worker
                self._sent_s[request_id] = now_s
                self._news.append((request_id, last))
                log.info(
                    "request %s moves from worker %d to %d (%s)",
                    request_id, last["from"] + 1, worker + 1, last["why"],
                )  # fmt: skip

    def replayed(self, replays: Iterable[protocol.Replayed], now_s: float) -> None:
        """A worker has replayed requests that moved, or whose worker died."""
        for one in replays:
            self._policy.cost.replayed(one.steps, one.took_s)
            if (sent_s := self._sent_s.pop(one.request_id, None)) is not None:
                self._policy.cost.moved(now_s - one.ago_s - one.took_s - sent_s)

    def statistics(self) -> dict[str, Any]:
        """Moves by reason, and what one takes."""
        cost = self._policy.cost
        seconds = {"start_s": cost.start_s, "replay_s": cost.replay_s}
        return {"moves": self.counts, "move_cost": seconds}

    def news(self) -> list[SeenMove]:
        """The moves since the last time."""
        news = [self._news.popleft() for _ in range(len(self._news))]
        return [SeenMove(name, one["at"], one["from"], one["to"], one["why"]) for name, one in news]

    def moves_of(self, request_id: str) -> list[dict[str, Any]]:
        """When a request moved, from where to where, and why."""
        return list(self._moves.get(request_id, ()))

    def _can_move(self, request: int) -> bool:
        name = self._names.get(request)
        return name is not None and self._journals is not None and self._journals.is_whole(name)

    def _ask(self, move: Move) -> None:
        self._asked[move.request] = move
        self._release(move.worker, self._names[move.request])
