"""Keep the workers of a pool running, one task each, with retries of failed loads."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from carpool.errors import LoadFailed
from carpool.fleet.members import Member

log = logging.getLogger("carpool")

RETRY_S = 30.0  # delay before a failed worker loads again, once another is ready


class WorkerTasks:
    """The tasks of a pool's workers, and one that ends with them.

    Args:
        is_draining: whether the end of a worker is expected.
    """

    def __init__(self, is_draining: Callable[[], bool]) -> None:
        self._is_draining = is_draining
        self.first_ready = asyncio.Event()  # set when any worker is ready
        self._tasks: dict[int, asyncio.Task[None]] = {}  # keyed by the worker's number
        self._end: asyncio.Future[None] | None = None  # resolves at the end of all workers
        self._others_ready: Callable[[], bool] = lambda: False

    def start(
        self, members: Iterable[Member], others_ready: Callable[[], bool] | None
    ) -> "asyncio.Task[None]":
        """Start workers in parallel. The task ends with `stop`, or fails with `LoadFailed`.

        If `others_ready` says that other models are ready, a failed load is retried instead.
        """
        self._others_ready = others_ready or self._others_ready
        self._end = asyncio.get_running_loop().create_future()
        for member in members:
            self.begin(member)
        return asyncio.create_task(asyncio.wait_for(self._end, None))

    def begin(self, member: Member) -> None:
        """Start a worker."""
        task = self._tasks[member.number] = asyncio.create_task(self._keep(member))
        task.add_done_callback(self._ended)

    async def end(self, member: Member) -> None:
        """End the task of a stopped worker."""
        if (task := self._tasks.pop(member.number, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """End all tasks, after their processes have ended."""
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
        """Keep a worker running. A failed load ends the pool, unless other workers are ready."""
        while True:
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
