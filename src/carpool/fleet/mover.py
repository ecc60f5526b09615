"""Moves running requests between the workers of a pool, and records which moved.

`moves.py` chooses. A worker that is asked gives the request up at its next step, or not at all:
where its journal lacks more than that. The cost of a move is measured: workers report how long
replays took and when they ended.
"""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from carpool.fleet.moves import Move, Moves, left
from carpool.fleet.pool_queue import PoolQueue, PoolRequest
from carpool.telemetry.activity import SeenMove
from carpool.worker import protocol
from carpool.worker.journals import Journals

log = logging.getLogger("carpool")

KEPT_REQUESTS = 1000  # whose moves are known
KEPT_MOVES = 256  # moves kept until the next report


class Mover:
    """Moves the requests of one pool; on the event loop.

    Args:
        journals: of the requests; None: none can move.
        release: asks a worker, by its number, to give a request up.
        model_of: see `Moves`.
    """

    def __init__(
        self,
        queue: PoolQueue,
        journals: Journals | None,
        release: Callable[[int, str], None],
        model_of: Callable[[int], str] = lambda worker: "",
    ) -> None:
        self._queue, self._journals, self._release = queue, journals, release
        self._policy = Moves(queue.router, self._can_move, model_of)
        self._moves: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()  # by request id
        self._news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=KEPT_MOVES)
        self.counts = Counter[str]()  # requests given up, by reason

    def ended(self, entry: PoolRequest) -> None:
        self._policy.ended(entry.number)

    def look(self, now_s: float) -> None:
        """Ask for what is worth it now. To be called about once a second and worker."""
        if self._journals is not None and (move := self._policy.choose(now_s)) is not None:
            self._ask(move)

    def drain(self, worker: int) -> None:
        """Have a worker give up all that others can go on with."""
        for move in self._policy.drain(worker) if self._journals is not None else ():
            self._ask(move)

    def released(self, entry: PoolRequest) -> int | None:
        """A worker has given a request up: only what is left of it counts from now on.

        Returns:
            The worker that is to have it; None: whichever.
        """
        move, entry.move = entry.move, None
        owner = self._queue.router.owner(entry.number)
        if owner is not None:
            entry.work = left(owner.bound[entry.number])
        if move is None:
            return None
        self.counts[move.why] += 1
        record = {"at": time.time(), "from": move.worker, "to": None, "why": move.why}
        self._moves.setdefault(entry.request_id, []).append(record)
        self._moves.move_to_end(entry.request_id)
        while len(self._moves) > KEPT_REQUESTS:
            self._moves.popitem(last=False)
        return move.to

    def bound(self, entry: PoolRequest, worker: int, now_s: float) -> None:
        """A request was bound to a worker."""
        moves = self._moves.get(entry.request_id)
        if moves and moves[-1]["to"] is None:
            last = moves[-1]
            last["to"], entry.moved_s = worker, now_s
            self._news.append((entry.request_id, last))
            log.info(
                "request %s moves from worker %d to %d (%s)",
                entry.request_id, last["from"] + 1, worker + 1, last["why"],
            )  # fmt: skip

    def replayed(self, worker: int, replays: Iterable[protocol.Replayed], now_s: float) -> None:
        """A worker has replayed requests that moved, or that another worker had when it died."""
        moved = {e.request_id: e for e in self._queue.of(worker) if e.moved_s is not None}
        for replay in replays:
            self._policy.cost.replayed(replay.steps, replay.took_s)
            entry = moved.get(replay.request_id)
            if entry is not None and entry.moved_s is not None:
                self._policy.cost.moved(now_s - replay.ago_s - replay.took_s - entry.moved_s)
                entry.moved_s = None

    def statistics(self) -> dict[str, Any]:
        """Moves by reason, and what one takes."""
        cost = self._policy.cost
        seconds = {"start_s": cost.start_s, "replay_s": cost.replay_s}
        return {"moves": dict(self.counts), "move_cost": seconds}

    def news(self) -> list[SeenMove]:
        """The moves since the last time."""
        news = [self._news.popleft() for _ in range(len(self._news))]
        return [SeenMove(name, m["at"], m["from"], m["to"], m["why"]) for name, m in news]

    def moves_of(self, request_id: str) -> list[dict[str, Any]]:
        """When a request moved, from where to where, and why."""
        return list(self._moves.get(request_id, ()))

    def _can_move(self, number: int) -> bool:
        entry, journals = self._queue.requests.get(number), self._journals
        return entry is not None and journals is not None and journals.is_whole(entry.request_id)

    def _ask(self, move: Move) -> None:
        entry = self._queue.requests[move.request]
        entry.move = move
        self._release(move.worker, entry.request_id)
