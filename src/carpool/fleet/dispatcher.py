"""Runs the requests of a pool: admits each, binds it to a worker, and to another if that dies.

Running requests move between workers as `moves.py` chooses. A worker releases a moving request at
its next step, unless its journal lacks more than one step.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from carpool.config import EngineSettings
from carpool.errors import Starting, WorkerLost
from carpool.fleet.members import Member, Members
from carpool.fleet.moves import Move, Moves, left
from carpool.fleet.pool_queue import PoolQueue, PoolRequest
from carpool.telemetry.activity import SeenMove
from carpool.types import CheckedRequest, OnProgress
from carpool.worker import protocol
from carpool.worker.in_flight import OnPreview
from carpool.worker.journals import Journals
from carpool.worker.requests import Moved
from carpool.worker.watchdog import INTERVAL_S

log = logging.getLogger("carpool")

KEPT_MOVES = 1000  # requests with remembered moves; also moves per report


class Dispatcher:
    """Runs the requests of one pool, and takes the reports of its workers; on the event loop.

    Args:
        settings: each worker's settings; queue and concurrency limits are for the whole pool.
        journals: the requests' journals; those without one cannot move.
        is_draining: whether requests of dead workers fail.
        is_choice: as in `Router`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        members: Members,
        journals: Journals,
        is_draining: Callable[[], bool],
        *,
        is_choice: bool = True,
    ) -> None:
        self._members, self._journals, self._is_draining = members, journals, is_draining
        self.queue = PoolQueue(
            settings, lambda: members.ready.card if members.ready else None, is_choice=is_choice
        )
        self.moves = Moves(self.queue.router, self._can_move, members.model_of)
        self._moved: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()  # moves by request id
        self._news: deque[SeenMove] = deque(maxlen=KEPT_MOVES)
        self._counts = Counter[str]()  # released requests, by reason

    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None,
        on_preview: OnPreview | None,
        waited_s: float,
    ) -> protocol.Done:
        """Run a request; arguments and errors as in `Pool.submit`."""
        has_begun = self._journals.starts_late(request.request_id)
        entry = self.queue.admit(request, waited_s, has_begun=has_begun)
        to: int | None = None
        try:
            while True:
                member = self._members[await self.queue.bound(entry, to)]
                self._bound(entry, member.number)
                try:
                    return await member.handle.submit(
                        entry.request,
                        on_progress,
                        on_preview,
                        waited_s=asyncio.get_running_loop().time() - entry.work.arrived_s,
                        evidence=entry.evidence,
                        is_admitted=entry.is_admitted,
                    )
                except Moved as moved:
                    to = self._released(entry) if moved.was_released else None
                except (Starting, WorkerLost):  # the worker died while the request was sent
                    if self._is_draining():
                        raise
                entry.is_admitted = True
                self.queue.drop(entry)
        finally:
            self._journals.close(entry.request_id)
            self.moves.ended(entry.number)
            self.queue.end(entry)

    def changed(self, member: Member, *, is_open: bool) -> None:
        """Handle a worker that starts or stops accepting requests."""
        self.queue.router.open(member.number, is_open)
        self.queue.assign_soon()

    def reported(self, member: Member, report: protocol.Report) -> None:
        """Handle a report: seconds of steps, and remaining steps of requests."""
        share_s = self.queue.reported(member.number, report)
        if abs(share_s - member.told_s) > 0.1 * max(share_s, member.told_s):
            member.told_s = share_s
            member.handle.hold(share_s)
        self.queue.assign_soon()
        now_s = asyncio.get_running_loop().time()
        if self.queue.router.queue and (move := self.moves.pause(now_s)) is not None:
            self._ask(move)

    async def empty(self, member: Member) -> None:
        """Wait until a worker has no requests; move those that can continue elsewhere."""
        idle = asyncio.create_task(self.queue.wait_idle(member.number))
        try:
            while not idle.done():
                for move in self.moves.drain(member.number):
                    self._ask(move)
                await asyncio.wait([idle], timeout=INTERVAL_S)
        finally:
            idle.cancel()

    def statistics(self) -> dict[str, Any]:
        """The held requests, and the moves by reason."""
        queue = self.queue
        line = {"requests": queue.held, "work_s": queue.router.held_s, "stage": queue.stage}
        return {"moves": dict(self._counts), "held": line}

    # Moves

    def news(self) -> list[SeenMove]:
        """The moves since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def moves_of(self, request_id: str) -> list[dict[str, Any]]:
        """The moves of a request: time, workers, reason."""
        return list(self._moved.get(request_id, ()))

    def _can_move(self, number: int) -> bool:
        entry = self.queue.requests.get(number)
        return entry is not None and self._journals.is_whole(entry.request_id)

    def _ask(self, move: Move) -> None:
        entry = self.queue.requests[move.request]
        entry.move = move
        self._members[move.worker].handle.release(entry.request_id)

    def _released(self, entry: PoolRequest) -> int | None:
        """Handle a released request: only its remaining work counts from now on.

        Returns:
            The worker that gets it next; None: any.
        """
        move, entry.move = entry.move, None
        owner = self.queue.router.owner(entry.number)
        if owner is not None:
            entry.work = left(owner.bound[entry.number])
        if move is None:
            return None
        self._counts[move.why] += 1
        record = {"at": time.time(), "from": move.worker, "to": None, "why": move.why}
        self._moved.setdefault(entry.request_id, []).append(record)
        self._moved.move_to_end(entry.request_id)
        while len(self._moved) > KEPT_MOVES:
            self._moved.popitem(last=False)
        return move.to

    def _bound(self, entry: PoolRequest, worker: int) -> None:
        """Record that a request was bound to a worker."""
        moves = self._moved.get(entry.request_id)
        if not moves or moves[-1]["to"] is not None:
            return
        last = moves[-1]
        last["to"] = worker
        move = SeenMove(entry.request_id, last["at"], last["from"], worker, last["why"])
        self._news.append(move)
        log.info(
            "request %s moves from worker %d to %d (%s)",
            move.request_id, move.from_worker + 1, worker + 1, move.why,
        )  # fmt: skip
