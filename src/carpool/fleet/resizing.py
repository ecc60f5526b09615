"""Resizing and rolling updates: add, remove or replace the workers of a pool while it serves.

No request fails: a worker to remove gets no more requests, and ends when it has none.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from carpool.fleet.autoscaler import Autoscaler, Scale
from carpool.fleet.members import Member
from carpool.fleet.worker_tasks import RETRY_S
from carpool.worker.watchdog import INTERVAL_S

if TYPE_CHECKING:
    from carpool.fleet.pool import Pool

log = logging.getLogger("carpool")

PLACE_S = 2 * RETRY_S  # wait for a new worker before an old one makes room


class Resizer:
    """Resizes one pool; on the event loop.

    Args:
        scale: bounds for scaling with the load; None: no scaling.
    """

    def __init__(self, pool: "Pool", scale: Scale | None) -> None:
        self._pool, self._scale = pool, scale
        self._rolling: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    @property
    def is_rolling(self) -> bool:
        return self._rolling is not None and not self._rolling.done()

    def start(self) -> None:
        if self._scale is not None:
            self._following = asyncio.create_task(self._follow(Autoscaler(self._scale)))

    async def stop(self) -> None:
        tasks = [t for t in (self._following, self._rolling, *self._leaving) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, autoscaler: Autoscaler) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.look(autoscaler, asyncio.get_running_loop().time())

    def look(self, autoscaler: Autoscaler, now_s: float) -> None:
        """Add or remove workers, as the autoscaler decides."""
        if self.is_rolling:
            return
        demand = self._pool.demand
        target = autoscaler.workers(now_s, demand)
        if target == demand.workers:
            return
        log.info(
            "%d workers instead of %d: requests for %.3g s of work wait, %d workers are busy",
            target, demand.workers, demand.held_s, demand.busy,
        )  # fmt: skip
        for _ in range(demand.workers, target):
            self._pool.add_worker()
        for member in self._least_used()[: max(0, demand.workers - target)]:
            task = asyncio.create_task(self._pool.remove_worker(member))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _least_used(self) -> list[Member]:
        requests = {worker["worker"]: worker["requests"] for worker in self._pool.workers()}
        members = self._pool.members()
        members.sort(key=lambda m: (m.handle.state == "ready", requests[m.number], -m.number))
        return members

    def roll(self) -> None:
        """Replace each worker by a new one, one at a time."""
        if not self._pool.has_several:
            log.error("not rolled: a single worker has no place for another; start with --workers")
        elif self.is_rolling:
            log.error("not rolled: the last time has not ended yet")
        else:
            self._rolling = asyncio.create_task(self._roll())

    async def _roll(self) -> None:
        old = self._pool.members()
        log.info("rolling update: %d workers are replaced", len(old))
        for number, member in enumerate(old, 1):
            if not await self._replace(member):
                log.error("the rolling update ends after %d of %d workers", number - 1, len(old))
                return
        log.info("rolling update: done")

    async def _replace(self, old: Member) -> bool:
        """Start a new worker, then end the old one; returns whether that succeeded."""
        new = self._pool.add_worker(old.device)
        ready = asyncio.create_task(new.handle.wait_ready())
        try:
            await self._until(ready, new, PLACE_S)
            rest = [m for m in self._pool.members() if m not in (old, new)]
            is_served = any(member.handle.state == "ready" for member in rest)
            if not ready.done() and not new.error and is_served:
                log.info("no place for another worker: worker %d makes room", old.number + 1)
                await self._pool.remove_worker(old)
                await self._until(ready, new, None)
        finally:
            ready.cancel()
        if not ready.done() or ready.cancelled():
            log.error("the new worker cannot be loaded: %s", new.error or "it has no place")
            await self._pool.remove_worker(new)
            return False
        if old in self._pool.members():
            await self._pool.remove_worker(old)
        return True

    async def _until(self, ready: asyncio.Task[Any], new: Member, limit_s: float | None) -> None:
        failed = asyncio.create_task(new.has_failed.wait())
        await asyncio.wait({ready, failed}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
