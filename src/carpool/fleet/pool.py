"""A pool: one or more workers of one model behind one interface.

They share the requests of a `Dispatcher`, which runs the requests of a dead worker again.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from carpool.config import EngineSettings
from carpool.errors import Draining
from carpool.fleet.autoscaler import Demand, Scale
from carpool.fleet.dispatcher import Dispatcher
from carpool.fleet.members import MakeWorker, Member, Members
from carpool.fleet.resizing import Resizer
from carpool.fleet.worker_tasks import RETRY_S, WorkerTasks
from carpool.types import CheckedRequest, OnProgress
from carpool.worker import protocol
from carpool.worker.in_flight import OnPreview
from carpool.worker.journals import Journals
from carpool.worker.supervisor import Supervisor, WorkerState

log = logging.getLogger("carpool")

OnActivity = Callable[[protocol.Activity], None]
"""Called with an engine's activity, a few times a second."""


class Pool:
    """The workers of one model.

    Args:
        make: creates a worker.
        devices: one for each worker.
        settings: each worker's settings; queue and concurrency limits are for the whole pool.
        journals: the workers' journals, if they have any.
        workers: initial number; None: one for each device.
        scale: bounds for scaling with the load.
        is_fixed: a pool of one worker keeps exactly one.
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
        self.ranks = settings.context_parallel  # processes per worker: see `engine.group`
        self.has_several = len(self.devices) > 1 or not is_fixed or scale is not None
        self._is_draining, self._members = False, Members()
        self.adapters = self._members.adapters
        self._journals = Journals(of_all=False) if journals is None else journals
        self._dispatcher = Dispatcher(
            settings, self._members, self._journals, lambda: self._is_draining,
            is_choice=self.has_several,
        )  # fmt: skip
        self._queue = self._dispatcher.queue
        self._tasks = WorkerTasks(lambda: self._is_draining)
        self._resizer = Resizer(self, scale)
        self._is_open = asyncio.Event()
        self._number = 0  # number of the next worker
        self._on_activity: OnActivity | None = None
        for device in self.devices[:workers]:
            self._add(device)

    def _add(self, device: str) -> Member:
        number, self._number = self._number, self._number + 1
        member = Member(self, number, device, self._make)
        self._members.add(member)
        member.handle.watch(is_on=self._on_activity is not None)
        self._queue.add_worker(number)
        return member

    # State

    @property
    def handles(self) -> list[Supervisor]:
        return self._members.handles

    @property
    def ready(self) -> protocol.WorkerReady | None:
        """The model as served by the oldest worker; see `Members.ready`."""
        return self._members.ready

    @property
    def state(self) -> WorkerState:
        state = self._members.state
        if self._is_draining and state in ("ready", "draining"):
            return "draining"
        return "worker_lost" if state == "starting" and self._tasks.first_ready.is_set() else state

    @property
    def is_degraded(self) -> bool:
        """Whether only some of its workers are ready."""
        return self.state == "ready" and any(handle.state != "ready" for handle in self.handles)

    @property
    def private_tasks(self) -> dict[str, str]:
        """Why requests ride alone, by task; see docs/isolation.md."""
        return {task: why for member in self._members for task, why in member.private.items()}

    def workers(self) -> list[dict[str, Any]]:
        """Each worker: its number, device, state, requests, and its load error."""
        rows = list[dict[str, Any]]()
        for member in self._members:
            number, state = member.number, member.handle.state
            row = {"worker": number, "device": member.device, "state": state}
            row |= {"requests": self._queue.requests_of(number)}
            facts: dict[str, Any] = {"model_digest": self._members.model_of(number)}
            facts |= {"error": member.error, "ranks": self.ranks if self.ranks > 1 else None}
            rows.append(row | {name: fact for name, fact in facts.items() if fact})
        return rows

    # Start and stop

    def start(self, others_ready: Callable[[], bool] | None = None) -> "asyncio.Task[None]":
        """Start all workers in parallel; result and `others_ready` as in `WorkerTasks.start`."""
        self._resizer.start()
        return self._tasks.start(self._members, others_ready)

    async def wait_ready(self) -> protocol.WorkerReady:
        """Wait until the first worker is ready."""
        await self._tasks.first_ready.wait()
        assert self.ready is not None
        return self.ready

    async def wait_open(self) -> None:
        """Wait until requests are accepted; forever once the server drains."""
        await self._is_open.wait()

    def _open(self) -> None:
        if self._is_draining or self.state != "ready":
            self._is_open.clear()
        else:
            self._is_open.set()

    def _close(self) -> None:
        """Stop accepting requests."""
        self._is_draining = True
        self._is_open.clear()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish accepted ones, and fail the rest at the timeout."""
        self._close()
        if self._queue:
            log.info("draining: %d requests still run", len(self._queue))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._queue.wait_empty()
        self._queue.fail(Draining("the server ended before this request could begin"))
        for handle in self.handles:
            handle.fail_all(Draining(f"the server ended after its grace period of {timeout_s:g} s"))

    async def stop(self) -> None:
        """Stop the workers; returns when their processes have ended."""
        self._close()
        await self._resizer.stop()
        self._queue.fail(Draining("the server was stopped at once", retry_after_s=5))
        await asyncio.gather(*(handle.stop() for handle in self.handles))
        await self._tasks.stop()

    # Scaling

    @property
    def demand(self) -> Demand:
        """The backlog, and the numbers of workers and of busy ones."""
        staying = self.members()
        busy = sum(self._queue.requests_of(member.number) > 0 for member in staying)
        return Demand(len(staying), busy, self._queue.router.held_s)

    def members(self) -> list[Member]:
        """The workers that are not leaving."""
        return [member for member in self._members if not member.is_leaving]

    def add_worker(self, device: str | None = None) -> Member:
        """Start a worker on this device, or on the device with the fewest workers."""
        counts = Counter(member.device for member in self._members)  # leaving ones included
        member = self._add(device or min(self.devices, key=lambda device: counts[device]))
        self._tasks.begin(member)
        return member

    async def remove_worker(self, member: Member) -> None:
        """Drain a worker: send it no more requests, wait for its last one, and stop it."""
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
        """Handle a worker that starts or stops accepting requests."""
        is_open = member.handle.takes_requests and not member.is_leaving
        if is_open:
            member.error, member.told_s = "", 0.0
            self._members.compare_models(is_rolling=self._resizer.is_rolling)
            self._members.compare_adapters(is_rolling=self._resizer.is_rolling)
            self._tasks.first_ready.set()
            if not member.was_ready and (ready := member.handle.ready) is not None:
                member.was_ready = True
                log.info(
                    "worker %d (%s) is ready, loaded in %.1f s; workers: %d",
                    member.number + 1, member.device, ready.load_s, len(self._members),
                )  # fmt: skip
        self._open()
        self._dispatcher.changed(member, is_open=is_open)

    def worker_reported(self, member: Member, report: protocol.Report) -> None:
        """Handle a report: seconds of steps, and remaining steps of requests."""
        self._dispatcher.reported(member, report)

    # Requests

    def check_open(self) -> None:
        """Raise unless requests are accepted."""
        if self._is_draining:
            raise Draining.of_new_work()
        if self.state != "ready":
            self._members.check_open(self._tasks.first_ready.is_set(), RETRY_S)

    def check_room(self, tenant: str = "") -> None:
        """Refuse a request before its body is read; see `PoolQueue.check_room`."""
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
            waited_s: seconds it waited for its model to load.

        Raises:
            The errors of `Supervisor.submit`; Overloaded and TooLate as in the engine.
        """
        self.check_open()
        self.check_room(request.tenant)
        return await self._dispatcher.submit(request, on_progress, on_preview, waited_s)

    # For all workers

    def roll(self) -> None:
        """Replace all workers in a rolling update; see `Resizer`."""
        self._resizer.roll()

    def reload(self) -> None:
        """Let all workers reload their adapter folder and batching config."""
        for handle in self.handles:
            handle.reload()

    async def add_lora(self, name: str, path: str) -> None:
        """See `Members.add_lora`."""
        await self._members.add_lora(name, path)

    async def statistics(self) -> dict[str, Any]:
        """Statistics of a single worker; else sums, and the statistics of every ready worker."""
        again = {"steps_again": self._journals.steps_again}
        if not self.has_several:
            return await self.handles[0].statistics() | again
        self.check_open()
        total = await self._members.statistics(self.workers())
        total["waiting"] += self._queue.held
        return {**total, **again, **self._dispatcher.statistics()}

    async def estimate(self, request: CheckedRequest) -> protocol.Estimated:
        """Predict the time of a request that arrives now, on the worker that would start it."""
        self.check_open()
        ready = [handle for handle in self.handles if handle.state == "ready"]
        estimates = [await handle.estimate(request) for handle in ready]
        return min(estimates, key=lambda estimate: estimate.wait_s)

    def watch_activity(self, listener: OnActivity | None) -> None:
        """Send the engines' activity and moves to a listener; None: to no listener."""
        self._dispatcher.news()  # drop earlier moves
        self._on_activity = listener
        for handle in self.handles:
            handle.watch(is_on=listener is not None)

    def worker_acted(self, activity: protocol.Activity) -> None:
        """Send a worker's activity to the listener, with the moves since the last one."""
        if self._on_activity is not None:
            activity.moves = self._dispatcher.news()
            self._on_activity(activity)

    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The timelines of requests, from the last worker of each."""
        self.check_open()
        timelines = await self._members.timelines(request_ids)
        return [line | {"moves": self._dispatcher.moves_of(line["id"])} for line in timelines]
