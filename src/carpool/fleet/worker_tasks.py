"""Keeps the workers of a pool running, a task each; one that fails to load is tried again."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from carpool.errors import LoadFailed
from carpool.fleet.members import Member
from carpool.worker import protocol

log = logging.getLogger("carpool")

RETRY_S = 30.0  # delay before a failed worker loads again, once another is ready


class WorkerTasks:
    """The tasks of a pool's workers, and the one that ends with them.

    Args:
        loaded: is called when a worker has loaded the model.
        is_draining: whether workers that end are meant to.
    """

    def __init__(
        self,
        loaded: Callable[[Member, protocol.WorkerReady], None],
        is_draining: Callable[[], bool],
    ) -> None:
        self._loaded, self._is_draining = loaded, is_draining
        self.first_ready = asyncio.Event()  # any worker is ready
        self._tasks: dict[int, asyncio.Task[None]] = {}  # key: the worker's number
        self._end: asyncio.Future[None] | None = None  # the end of all workers
        self._others_ready: Callable[[], bool] = lambda: False

    def start(
        self, members: Iterable[Member], others_ready: Callable[[], bool] | None
    ) -> "asyncio.Task[None]":
        """Start workers side by side. The task ends with `stop`, or fails with `LoadFailed`.

        While `others_ready` says that other models are, this one is tried again instead.
        """
        self._others_ready = others_ready or self._others_ready
        self._end = asyncio.get_running_loop().create_future()
        for member in members:
            self.begin(member)
        return asyncio.create_task(self._wait_end(self._end))

    async def _wait_end(self, end: "asyncio.Future[None]") -> None:
        await end

    def begin(self, member: Member) -> None:
        """Start a worker."""
        task = self._tasks[member.number] = asyncio.create_task(self._keep(member))
        task.add_done_callback(self._ended)

    async def end(self, member: Member) -> None:
        """Forget a worker that was ended."""
        if (task := self._tasks.pop(member.number, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """End all, once their processes have ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        assert self._end is not None
        if self._end.done() or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._end.set_exception(error)
        elif self._is_draining():
            self._end.set_result(None)

    async def _keep(self, member: Member) -> None:
        """Keep a worker running. One that cannot load ends the pool, unless others are ready."""
        while True:
            waiting = asyncio.create_task(self._wait_ready(member))
            try:
                await member.handle.start()
                return
            except LoadFailed as error:
                if not self.first_ready.is_set() and not self._others_ready():
                    raise
                member.error = str(error)
                member.has_failed.set()
                log.error("worker %d (%s): %s", member.number, member.device, error)
                await asyncio.sleep(RETRY_S)
            finally:
                waiting.cancel()

    async def _wait_ready(self, member: Member) -> None:
        ready = await member.handle.wait_ready()
        member.error = ""
        self.first_ready.set()
        self._loaded(member, ready)
