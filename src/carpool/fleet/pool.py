"""A pool: the workers of one model, behind one interface, be they one or many.

They share the requests of a `Dispatcher`, which has those of a worker that died run again.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from carpool.config import EngineSettings
from carpool.errors import Draining
from carpool.fleet.autoscaler import Demand, Scale
from carpool.fleet.dispatcher import Dispatcher
from carpool.fleet.members import MakeWorker, Member, Members
from carpool.fleet.resizing import Resizer
from carpool.fleet.serving import WorkerHandle
from carpool.fleet.worker_tasks import RETRY_S, WorkerTasks
from carpool.types import CheckedRequest, OnProgress
from carpool.worker import protocol
from carpool.worker.journals import Journals
from carpool.worker.requests import OnPreview
from carpool.worker.supervisor import OnActivity, WorkerState

log = logging.getLogger("carpool")


class Pool:
    """The workers of one model.

    Args:
        make: makes a worker.
        devices: of the workers, one each.
        settings: of each worker; what may wait and run counts for all of them together.
        journals: those of the workers, if they keep some.
        workers: at the start; None: one on each of the devices.
        scale: workers come and go with the load, between these bounds.
        is_fixed: a pool of one worker stays one.
    """

    def __init__(
        self,
        make: MakeWorker,
        devices: Sequence[str],
        settings: EngineSettings,
        journals: Journals | None = None,
        *,
        workers: int | None = None,
        scale: Scale | None = None,
        is_fixed: bool = True,
    ) -> None:
        self._make, self.devices = make, list(devices)
        self.lora_dir = settings.lora_dir
        self.ranks = settings.context_parallel  # processes of each worker: see `engine.group`
        self.has_several = len(self.devices) > 1 or not is_fixed or scale is not None
        self._is_draining, self._journals = False, journals
        self._members = Members()
        self._dispatcher = Dispatcher(
            settings,
            self._members,
            journals,
            lambda: self._is_draining,
            is_choice=self.has_several,
        )
        self._queue = self._dispatcher.queue
        self._tasks = WorkerTasks(self._loaded, lambda: self._is_draining)
        self._resizer = Resizer(self, scale)
        self._is_open = asyncio.Event()
        self._number = 0  # the next worker's
        for device in self.devices[:workers]:
            self._add(device)

    def _add(self, device: str) -> Member:
        number, self._number = self._number, self._number + 1
        member = Member(self, number, device, self._make)
        self._members.add(member)
        self._queue.add_worker(number)
        return member

    # What it is

    @property
    def handles(self) -> list[WorkerHandle]:
        return self._members.handles

    @property
    def ready(self) -> protocol.WorkerReady | None:
        """The model, as the oldest worker serves it; see `Members.ready`."""
        return self._members.ready

    @property
    def state(self) -> WorkerState:
        state = self._members.state
        if self._is_draining and state in ("ready", "draining"):
            return "draining"
        return "worker_lost" if state == "starting" and self._tasks.first_ready.is_set() else state

    @property
    def is_degraded(self) -> bool:
        """Whether some of its workers are ready, and others are not."""
        return self.state == "ready" and any(handle.state != "ready" for handle in self.handles)

    @property
    def private_tasks(self) -> dict[str, str]:
        """Why requests ride alone, by task; see docs/isolation.md."""
        return {task: why for member in self._members for task, why in member.private.items()}

    def workers(self) -> list[dict[str, Any]]:
        """Each worker: its number, device, state, requests, and why it cannot load."""
        workers = self._members.shown(self._queue.requests_of)
        return [worker | {"ranks": self.ranks} for worker in workers] if self.ranks > 1 else workers

    # Its life

    def start(self, others_ready: Callable[[], bool] | None = None) -> "asyncio.Task[None]":
        """Start all workers side by side; the result and `others_ready` are as of `WorkerTasks`."""
        self._resizer.start()
        return self._tasks.start(self._members, others_ready)

    def _loaded(self, member: Member, ready: protocol.WorkerReady) -> None:
        """A worker has loaded the model, for the first time or again."""
        self._open()
        log.info(
            "worker %d (%s) is ready, loaded in %.1f s; workers: %d",
            member.number + 1, member.device, ready.load_s, len(self._members),
        )  # fmt: skip

    async def wait_ready(self) -> protocol.WorkerReady:
        """Wait until the first worker is ready."""
        await self._tasks.first_ready.wait()
        assert self.ready is not None
        return self.ready

    async def wait_open(self, model: str | None = None) -> None:
        """Wait until requests are accepted; without an end once the server drains."""
        await self._is_open.wait()

    def _open(self) -> None:
        if self._is_draining or self.state != "ready":
            self._is_open.clear()
        else:
            self._is_open.set()

    def _close(self) -> None:
        """Take no more requests."""
        self._is_draining = True
        self._is_open.clear()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, run those that were accepted; fail the rest at the timeout."""
        self._close()
        if self._queue:
            log.info("draining: %d requests still run", len(self._queue))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._queue.wait_empty()
        self._queue.fail(Draining("the server ended before this request could begin"))
        for handle in self.handles:
            handle.fail_all(Draining(f"the server ended {timeout_s:g} s after it was told to"))

    async def stop(self) -> None:
        """End the workers; returns when their processes have ended."""
        self._close()
        await self._resizer.stop()
        self._queue.fail(Draining("the server was told to end at once", retry_after_s=5))
        await asyncio.gather(*(handle.stop() for handle in self.handles))
        await self._tasks.stop()

    # Workers that come and go

    @property
    def demand(self) -> Demand:
        """The held work, and how many workers there are and are busy."""
        staying = self.members()
        busy = sum(self._queue.requests_of(member.number) > 0 for member in staying)
        return Demand(len(staying), busy, self._queue.router.held_s)

    def members(self) -> list[Member]:
        """The workers that stay."""
        return [member for member in self._members if not member.is_leaving]

    def add_worker(self, device: str | None = None) -> Member:
        """Start a worker, on this device, or on the one that has the fewest."""
        counts = Counter(member.device for member in self._members)  # those that leave, too
        member = self._add(device or min(self.devices, key=lambda device: counts[device]))
        self._tasks.begin(member)
        return member

    async def remove_worker(self, member: Member) -> None:
        """Give a worker no more requests, wait until those that it has have ended, and end it."""
        member.is_leaving = True
        self.worker_changed(member)
        await self._dispatcher.empty(member)
        await member.handle.stop_without_successor()
        await self._tasks.end(member)
        self._members.remove(member)
        self._queue.remove_worker(member.number)
        self._open()
        log.info("worker %d (%s) has ended", member.number + 1, member.device)

    def worker_changed(self, member: Member) -> None:
        """A worker takes requests, or no more."""
        is_open = member.handle.takes_requests and not member.is_leaving
        if is_open:
            member.error, member.told_s = "", 0.0
            self._members.compare_models(is_rolling=self._resizer.is_rolling)
            self._members.compare_adapters(is_rolling=self._resizer.is_rolling)
            self._tasks.first_ready.set()
        self._open()
        self._dispatcher.changed(member, is_open=is_open)

    def worker_reported(self, member: Member, report: protocol.Report) -> None:
        """A worker says what steps take, and what its requests have left."""
        self._dispatcher.reported(member, report)

    # Requests

    def check_open(self) -> None:
        """Raise unless requests are accepted now."""
        if self._is_draining:
            raise Draining.of_new_work()
        if self.state != "ready":
            self._members.check_open(self._tasks.first_ready.is_set(), RETRY_S)

    def check_room(self, tenant: str = "") -> None:
        """Refuse a request for which there is no room, before its body is read.

        Args:
            tenant: as of `PoolQueue.check_room`.

        Raises:
            Overloaded: as many requests are in flight as may run and wait, or of the tenant.
        """
        self._queue.check_room(tenant)

    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        *,
        waited_s: float = 0.0,
    ) -> protocol.Done:
        """Run a request. Cancelling the task cancels it.

        Args:
            waited_s: how long it waited for its model to be loaded.

        Raises:
            As `Supervisor.submit`; and Overloaded, TooLate as the engine does.
        """
        self.check_open()
        self.check_room(request.tenant)
        return await self._dispatcher.submit(request, on_progress, on_preview, waited_s)

    # For all workers

    def roll(self) -> None:
        """Replace all workers by new ones while they serve; see `Resizer`."""
        self._resizer.roll()

    def reload(self) -> None:
        """Have all workers read their adapter folder and batching config again."""
        self._members.reload()

    async def add_lora(self, name: str, path: str) -> None:
        """As `Members.add_lora`."""
        await self._members.add_lora(name, path)

    async def statistics(self) -> dict[str, Any]:
        """A lone worker's own; else sums, and those of every worker that is ready."""
        again = {"steps_again": self._journals.steps_again if self._journals else 0}
        if not self.has_several:
            return await self.handles[0].statistics() | again
        self.check_open()
        total = await self._members.statistics(self.workers())
        total["waiting"] += self._queue.held
        return {**total, **again, **self._dispatcher.statistics()}

    async def estimate(self, request: CheckedRequest) -> protocol.Estimated:
        """Predict the time of a request that came now, on the worker that would start it first."""
        self.check_open()
        return await self._members.estimate(request)

    def watch_activity(self, listener: OnActivity | None) -> None:
        """Send the engines' activity and moves to a listener; None: to no listener."""
        self._dispatcher.news()  # what was before is not told
        self._members.watch_activity(listener and partial(self._with_moves, listener))

    def _with_moves(self, listener: OnActivity, activity: protocol.Activity) -> None:
        activity.moves = self._dispatcher.news()
        listener(activity)

    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The timelines of requests, of the worker that had each last."""
        self.check_open()
        timelines = await self._members.timelines(request_ids)
        return [line | {"moves": self._dispatcher.moves_of(line["id"])} for line in timelines]
