"""Connect the front to one worker on a Ray cluster, or to a replacement if that is lost.

An unreachable worker may be slow, disconnected, or gone with its node, which Ray reports only after
15 s. So after `BEAT_S` a spare worker is placed on another node. The one that is reached first is
used, and the other one is ended.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carpool.fleet.handshake import CONNECT_S
from carpool.fleet.packets import BEAT_S
from carpool.fleet.ray import NOTICED_S, RayCluster
from carpool.fleet.remote_connection import RemoteConnection

log = logging.getLogger("carpool")

Reached = tuple[RemoteConnection, str]
"""A connection to a worker, and its node."""

Tries = dict["asyncio.Task[Reached | None]", Any]
"""Connection attempts, with their workers."""


class RayConnector:
    """Connects to one worker, wherever Ray has placed it.

    Args:
        cluster: places workers.
        connect: opens a connection.
        ranks: processes of the worker, if it is a group.
    """

    is_remote = True

    def __init__(
        self,
        cluster: RayCluster,
        model: str,
        spool: Path | None,
        connect: Callable[..., Any] = RemoteConnection.open,
        *,
        ranks: int = 1,
    ) -> None:
        self._cluster, self._model, self._spool = cluster, model, spool
        self._connect, self._ranks = connect, ranks
        self._actor: Any = None
        self._is_placed = False  # it was reached before, or left by an earlier front
        self._node = ""  # the last known node

    async def open(self) -> RemoteConnection:
        """Place the worker if needed, and connect; waits as long as needed.

        Raises:
            OSError: a new worker was placed, but cannot be reached.
        """
        slow = asyncio.get_running_loop().call_later(NOTICED_S, self._warn_slow)
        try:
            while True:
                if self._actor is None:
                    self._is_placed = self._cluster.workers(self._model) > 0
                    self._actor = await self._take()
                reached: Reached | None
                if self._is_placed:
                    self._actor, reached = await self._reach_any(self._actor)
                else:
                    reached = await self._reach(self._actor)
                if reached is not None:
                    connection, self._node = reached
                    self._is_placed = True
                    self._cluster.trust(self._node)
                    return connection
                self._actor = None
                await asyncio.sleep(BEAT_S)
        finally:
            slow.cancel()

    async def _take(self) -> Any:
        """Place a worker. A cancellation ends it: no front would know of it."""
        placing = asyncio.to_thread(self._cluster.take, self._model, self._ranks)
        taking = asyncio.create_task(placing)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.to_thread(self._cluster.end, await taking)
            raise

    async def _reach(self, actor: Any) -> Reached | None:
        """Connect to a worker; None: it has ended permanently."""
        address = await self._cluster.join(actor)
        if address is None:
            return None
        return await self._connect(address, self._spool), address.node

    async def _reach_at_last(self, actor: Any) -> Reached | None:
        """Like `_reach`, with retries while the worker is unreachable."""
        problem = ""
        while True:
            try:
                return await self._reach(actor)
            except OSError as error:
                if problem != (problem := str(error)):
                    log.warning("a worker of %s is out of reach: %s", self._model, error)
                await asyncio.sleep(BEAT_S)

    async def _reach_any(self, dead_actor: Any) -> tuple[Any, Reached]:
        """Connect to the lost worker or to a spare one, whichever is reached first."""
        tries: Tries = {asyncio.create_task(self._reach_at_last(dead_actor)): dead_actor}
        winner = dead_actor
        try:
            # the first connection through Ray takes long
            patience_s = BEAT_S if self._node else CONNECT_S
            for timeout_s in itertools.chain((patience_s, NOTICED_S), itertools.repeat(None)):
                if (contact := await _first(tries, timeout_s)) is not None:
                    winner = contact[0]
                    return contact
                if timeout_s == patience_s and tries and self._node:
                    self._cluster.suspect(self._node)
                log.warning("a worker of %s is lost: another one is placed", self._model)
                # the previous spare may wait for a place on the lost node
                await self._give_up(tries, without=dead_actor)
                spare = await self._take()
                tries[asyncio.create_task(self._reach_at_last(spare))] = spare
            raise AssertionError("the attempts have no end")
        finally:
            await self._give_up(tries, without=winner)
            for task in tries:
                task.cancel()

    async def _give_up(self, tries: Tries, without: Any) -> None:
        """End all attempted workers but one."""
        for task in [attempt for attempt, actor in tries.items() if actor is not without]:
            actor = tries.pop(task)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (reached := task.result()) is not None:
                await reached[0].close()
            await asyncio.to_thread(self._cluster.end, actor)

    def _warn_slow(self) -> None:
        log.warning(
            "a worker of %s has waited for a place in the Ray cluster for %g s: `ray status` shows "
            "free and requested resources",
            self._model, NOTICED_S,
        )  # fmt: skip

    async def end(self) -> None:
        """End the worker permanently."""
        actor, self._actor, self._is_placed = self._actor, None, False
        if actor is not None:
            await asyncio.to_thread(self._cluster.end, actor)


async def _first(tries: Tries, timeout_s: float | None) -> tuple[Any, Reached] | None:
    """The worker that is reached first; None: none in time, or all are gone."""
    loop = asyncio.get_running_loop()
    end_s = None if timeout_s is None else loop.time() + timeout_s
    while tries:
        left_s = None if end_s is None else max(0.0, end_s - loop.time())
        ready, _ = await asyncio.wait(tries, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ready:
            if (reached := task.result()) is not None:
                return tries.pop(task), reached
            del tries[task]
        if not ready:
            return None
    return None
