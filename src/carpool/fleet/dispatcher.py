"""Runs the requests of a pool: admits each, binds it to a worker, and to another if that dies."""

import asyncio
from collections.abc import Callable
from typing import Any

from carpool.config import EngineSettings
from carpool.errors import Starting, WorkerLost
from carpool.fleet.members import Member, Members
from carpool.fleet.mover import Mover
from carpool.fleet.pool_queue import PoolQueue
from carpool.types import CheckedRequest, OnProgress
from carpool.worker import protocol
from carpool.worker.journals import Journals
from carpool.worker.requests import Moved, OnPreview

ASKED_AGAIN_S = 1.0  # to give up what a worker that is to end has


class Dispatcher:
    """Runs the requests of one pool, and takes the reports of its workers; on the event loop.

    Args:
        settings: of each worker; what may wait and run counts for all of them together.
        is_draining: whether requests that their workers lose fail.
        is_choice: as of `Router`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        members: Members,
        journals: Journals | None,
        is_draining: Callable[[], bool],
        *,
        is_choice: bool = True,
    ) -> None:
        self._members, self._journals, self._is_draining = members, journals, is_draining
        self.queue = PoolQueue(
            settings,
            lambda: members.ready.card if members.ready else None,
            is_choice=is_choice,
        )
        self.mover = Mover(self.queue, journals, members.release, members.model_of)

    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None,
        on_preview: OnPreview | None,
        waited_s: float,
    ) -> protocol.Done:
        """Run a request; the arguments and what it raises are as for `Pool.submit`."""
        has_begun = self._journals is not None and self._journals.starts_late(request.request_id)
        entry = self.queue.admit(request, waited_s, has_begun=has_begun)
        to: int | None = None
        try:
            while True:
                member = self._members[await self.queue.bound(entry, to)]
                now_s = asyncio.get_running_loop().time()
                self.mover.bound(entry, member.number, now_s)
                try:
                    return await member.handle.submit(
                        entry.request,
                        on_progress,
                        on_preview,
                        waited_s=now_s - entry.work.arrived_s,
                        evidence=entry.evidence,
                        is_admitted=entry.is_admitted,
                    )
                except Moved as moved:
                    to = self.mover.released(entry) if moved.was_released else None
                except (Starting, WorkerLost):  # it died as the request was on its way
                    if self._is_draining():
                        raise
                entry.is_admitted = True
                self.queue.drop(entry)
        finally:
            if self._journals is not None:
                self._journals.close(entry.request_id)
            self.mover.ended(entry)
            self.queue.end(entry)

    def changed(self, member: Member, *, is_open: bool) -> None:
        """A worker takes requests, or no more."""
        self.queue.router.open(member.number, is_open)
        self.queue.assign_soon()

    def reported(self, member: Member, report: protocol.Report) -> None:
        """A worker says what steps take, and what its requests have left."""
        share_s = self.queue.reported(member.number, report)
        if abs(share_s - member.told_s) > 0.1 * max(share_s, member.told_s):
            member.told_s = share_s
            member.handle.hold(share_s)
        self.queue.assign_soon()
        now_s = asyncio.get_running_loop().time()
        self.mover.replayed(member.number, report.replays, now_s)
        if len(self._members) > 1:  # a single one may have a thousand requests to compare
            self.mover.look(now_s)

    async def empty(self, member: Member) -> None:
        """Wait until a worker has no requests; those that can go on elsewhere move."""
        idle = asyncio.create_task(self.queue.wait_idle(member.number))
        try:
            while not idle.done():
                self.mover.drain(member.number)
                await asyncio.wait([idle], timeout=ASKED_AGAIN_S)
        finally:
            idle.cancel()

    def statistics(self) -> dict[str, Any]:
        """The held requests, and the moves."""
        queue = self.queue
        line = {"requests": queue.held, "work_s": queue.router.held_s, "stage": queue.stage}
        return {**self.mover.statistics(), "held": line}
