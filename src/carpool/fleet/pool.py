"""A pool: the workers of one model, each supervised, behind the interface of a single one.

With several workers requests are held here until the router binds them to one. What a worker had
when it died goes to the others, and counts as before who ran in how many that did. A pool of one
worker holds nothing: the worker's own queue is as good, and it runs again what it had.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from carpool.config import EngineSettings
from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    Draining,
    LoadFailed,
    LoraRejected,
    Overloaded,
    Starting,
    TooLate,
    WorkerLost,
)
from carpool.fleet.load import RoutedRequest, StepTable, WorkerLoad
from carpool.fleet.router import Router
from carpool.fleet.serving import ServingState, WorkerHandle
from carpool.schedule.overload import ENTER, Pressure, again_s, refuses, stage
from carpool.schedule.policy import weights
from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.journals import Journals
from carpool.worker.supervisor import (
    Moved,
    OnActivity,
    OnPreview,
    OnProgress,
    WorkerListener,
)

log = logging.getLogger("carpool")

AGAIN_S = 30.0  # until a worker that could not load is tried again, once another one is ready
Size = tuple[int | None, int | None, int | None]

Make = Callable[[str, WorkerListener | None], WorkerHandle]
"""Makes the worker of a device; with a listener where it is one of several."""


class _Member(WorkerListener):
    """One worker of a pool."""

    def __init__(self, pool: "Pool", number: int, device: str, make: Make, is_alone: bool) -> None:
        self._pool, self.number, self.device = pool, number, device
        self.handle = make(device, None if is_alone else self)
        self.error = ""  # why it cannot be loaded
        self.told_s = 0.0  # the work that it was last told is held for it

    def changed(self) -> None:
        self._pool.worker_changed(self)

    def reported(self, report: protocol.Report) -> None:
        self._pool.worker_reported(self, report)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is held."""

    job: CheckedRequest
    worker: "asyncio.Future[_Member]"


class Pool:
    """The workers of one model.

    Args:
        make: makes a worker.
        devices: of the workers, one each.
        settings: of each worker; what may wait and run counts for all of them together.
        journals: those of the workers, if they keep some.
    """

    def __init__(
        self,
        make: Make,
        devices: Sequence[str],
        settings: EngineSettings,
        journals: Journals | None = None,
    ) -> None:
        self._settings, self._make, self.devices = settings, make, list(devices)
        self._is_alone = len(self.devices) == 1
        self._members = self._made()
        self._router = self._new_router()
        self._numbers = itertools.count(1)
        self._held: dict[int, _Waiting] = {}
        self._numbers_of: dict[str, int] = {}  # of requests in flight, by their ids
        self._lora: dict[str, str] = {}  # registered since the start
        self._first_ready, self._is_open = asyncio.Event(), asyncio.Event()
        self._is_empty = asyncio.Event()  # nothing is in flight any more
        self._is_draining, self._is_due, self._stage = False, False, 0
        self._journals = journals
        self._known: protocol.WorkerReady | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._greeting: asyncio.Task[None] | None = None

    def _made(self) -> list[_Member]:
        return [
            _Member(self, number, device, self._make, self._is_alone)
            for number, device in enumerate(self.devices)
        ]

    def _new_router(self) -> Router:
        shares = weights(self._settings.fair_share)
        router = Router(min_gain=self._settings.min_gain, fair_share=shares)
        for member in self._members:
            most = self._settings.max_running
            router.add_worker(WorkerLoad(member.number, {}, most, is_open=False))
        return router

    # What it is

    @property
    def handles(self) -> list[WorkerHandle]:
        return [member.handle for member in self._members]

    @property
    def ready(self) -> protocol.WorkerReady | None:
        """The model as the newest worker that got so far serves it."""
        for handle in self.handles:
            if handle.ready is not None:
                self._known = handle.ready
                break
        return self._known

    @property
    def state(self) -> ServingState:
        states: set[ServingState] = {handle.state for handle in self.handles}
        if self._is_draining and states & {"ready", "draining"}:
            return "draining"
        order: tuple[ServingState, ...] = (
            "ready",
            "draining",
            "starting",
            "worker_lost",
            "stopped",
        )
        for one in order:
            if one in states:
                was_ready = one == "starting" and self._first_ready.is_set()
                return "worker_lost" if was_ready else one
        return "stopped"

    @property
    def has_several(self) -> bool:
        """Whether it has more than one worker."""
        return not self._is_alone

    @property
    def ranks(self) -> int:
        """Processes of each worker that compute together: see `carpool.engine.group`."""
        return self._settings.context_parallel

    @property
    def is_degraded(self) -> bool:
        """Whether some of its workers are ready, and others are not."""
        return self.state == "ready" and any(one.state != "ready" for one in self.handles)

    def workers(self) -> list[dict[str, Any]]:
        """Each worker: its number, device, state, requests, and why it cannot load."""
        loads = self._router.workers
        return [
            {
                "worker": member.number,
                "device": member.device,
                "state": member.handle.state,
                "requests": len(loads[member.number].bound),
                **({"ranks": self.ranks} if self.ranks > 1 else {}),
                **({"error": member.error} if member.error else {}),
            }
            for member in self._members
        ]

    # Its life

    def start(self) -> "asyncio.Task[None]":
        """Start all workers side by side. The task ends with `stop`, or fails with `LoadFailed`."""
        self._tasks = [asyncio.create_task(self._keep(member)) for member in self._members]
        self._greeting = asyncio.create_task(self._greet())
        return asyncio.create_task(self._run())

    async def _run(self) -> None:
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _keep(self, member: _Member) -> None:
        """Keep a worker running. One that cannot load ends the pool, unless others are ready."""
        while True:
            try:
                await member.handle.start()
                return
            except LoadFailed as error:
                if self._is_alone or not self._first_ready.is_set():
                    raise
                member.error = str(error)
                log.error("worker %d (%s): %s", member.number, member.device, error)
                await asyncio.sleep(AGAIN_S)

    async def _greet(self) -> None:
        """Say of each worker when it is ready, where there are several."""

        async def wait(member: _Member) -> None:
            ready = await member.handle.wait_ready()
            self._first_ready.set()
            self._open()
            if not self._is_alone:
                log.info(
                    "worker %d of %d (%s) is ready, loaded in %.1f s",
                    member.number + 1, len(self._members), member.device, ready.load_s,
                )  # fmt: skip

        await asyncio.gather(*map(wait, self._members))

    async def wait_ready(self) -> protocol.WorkerReady:
        """Wait until the first worker is ready."""
        await self._first_ready.wait()
        assert self.ready is not None
        return self.ready

    async def wait_open(self) -> None:
        """Wait until requests are accepted; for ever once the server drains."""
        if self._is_alone:
            await self._members[0].handle.wait_open()
        await self._is_open.wait()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, run those that were accepted; fail the rest at the timeout."""
        self._is_draining = True
        self._is_open.clear()
        if not self._is_alone:
            if self._numbers_of:
                log.info("draining: %d requests still run", len(self._numbers_of))
                self._is_empty.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._is_empty.wait()
            timeout_s = 0.0
            self._fail_held(Draining("the server ended before this request could begin"))
        await asyncio.gather(*(handle.drain(timeout_s) for handle in self.handles))

    async def stop(self) -> None:
        """End the workers; returns when their processes have ended."""
        self._is_draining = True
        self._is_open.clear()
        if self._greeting is not None:
            self._greeting.cancel()
        self._fail_held(Draining("the server was told to end at once", retry_after_s=5))
        await asyncio.gather(*(handle.stop() for handle in self.handles))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Requests

    def check_open(self) -> None:
        """Raise unless requests are accepted now."""
        if self._is_draining:
            raise Draining("the server is ending and takes no new requests", retry_after_s=5)
        if self.state == "ready":
            return
        errors = []
        for handle in self.handles:
            try:
                handle.check_open()
            except CarpoolError as error:
                errors.append(error)
        if errors:
            soonest = min(errors, key=lambda error: error.retry_after_s or 0.0)
            lost = (error for error in errors if isinstance(error, WorkerLost))
            raise next(lost, soonest) if self._first_ready.is_set() else soonest

    def check_room(self) -> None:
        """Refuse a request for which there is no room, before its body is read.

        Raises:
            Overloaded: as many requests are in flight as may run and wait.
        """
        if self._is_alone:
            self._members[0].handle.check_room()
            return
        settings, running = self._settings, self._settings.max_running * len(self._members)
        if len(self._numbers_of) >= running + settings.max_queue:
            raise Overloaded(
                f"the queue is full: {len(self._numbers_of)} requests wait or run, the most is "
                f"{running} + {settings.max_queue} (--max-running, --max-queue)",
                retry_after_s=min(max(self._router.held_for_s() / 10, 1.0), 120.0),
            )

    async def submit(
        self,
        job: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
    ) -> protocol.Done:
        """Run a request on some worker. Cancelling the awaiting task cancels it.

        Raises:
            As `Supervisor.submit`; and Overloaded, TooLate as the engine does.
        """
        if self._is_alone:
            return await self._members[0].handle.run(job, on_progress, on_preview)
        self.check_open()
        self.check_room()
        began_s, number, deaths = self._now_s(), next(self._numbers), 0
        work = self._routed(job, number, began_s)
        job = self._admitted(job, work)
        self._numbers_of[job.request_id] = number
        try:
            while True:
                member = await self._bound(job, work)
                waited_s = self._now_s() - began_s
                try:
                    return await member.handle.run(
                        job, on_progress, on_preview, waited_s=waited_s, deaths=deaths
                    )
                except Moved as moved:
                    deaths = moved.deaths
                except (Starting, WorkerLost):  # it died as the request was on its way
                    if self._is_draining:
                        raise
                self._router.drop(number)
        finally:
            del self._numbers_of[job.request_id]
            if self._journals is not None:
                self._journals.close(job.request_id)
            if not self._numbers_of:
                self._is_empty.set()
            self._router.drop(number)
            self._assign_soon()

    def _admitted(self, job: CheckedRequest, work: RoutedRequest) -> CheckedRequest:
        """Refuse a request as the engine would whose queue holds what is held here."""
        most_s = self._settings.max_wait
        pressure = self._pressure()
        if pressure.most >= ENTER[0] and self._is_due:  # some of it may be bound at once
            self._assign()
            pressure = self._pressure()
        self._stage = stage(self._stage, pressure)
        held, wait_s = len(self._router.waiting), pressure.wait * most_s
        if refuses(self._stage, job.priority) and pressure.fill < 1:
            which = "no new one" if self._stage == 3 else "none of priority below 0"
            raise Overloaded(
                f"the server is overloaded: {held} requests wait, with work for some "
                f"{wait_s:.3g} s (the most is {most_s:g} s, --max-wait): {which} is taken",
                retry_after_s=again_s(self._stage, wait_s, most_s),
            )
        needed_s = self._router.needed_s(work)
        if job.deadline_s is not None and needed_s is not None and needed_s > job.deadline_s:
            rule = f"cannot be met: it would take {needed_s:.3g} s"
            late = f"deadline_s={job.deadline_s:g} {rule}"
            if not self._settings.admit_late:
                fewer = "ask for fewer steps or a smaller size"
                raise TooLate(f"{late}; {fewer}", param="deadline_s")
            log.warning("request %s: %s", job.request_id, late)
        return replace(job, previews=0) if self._stage else job

    def _pressure(self) -> Pressure:
        waiting = len(self._router.waiting)
        wait_s = self._router.held_for_s() if waiting else 0.0
        return Pressure(
            min(wait_s, 1e9) / self._settings.max_wait, waiting / max(1, self._settings.max_queue)
        )

    def _routed(self, job: CheckedRequest, number: int, now_s: float) -> RoutedRequest:
        ready = self.ready
        assert ready is not None
        deadline_s = float("inf") if job.deadline_s is None else now_s + job.deadline_s
        size = (job.arguments.get(name) for name in ("width", "height", "num_frames"))
        return RoutedRequest(
            number,
            self._kind(*size),
            max(1, ready.card.steps(job.arguments)),
            now_s,
            deadline_s,
            job.priority,
            job.tenant,
            job.user,
        )

    def _kind(self, width: int | None, height: int | None, frames: int | None) -> Size:
        """The size of a request, with the default where it says none."""
        card = self.ready.card if self.ready else None
        default = (card.default_size_px if card else None) or (None, None)
        return width or default[0], height or default[1], frames

    async def _bound(self, job: CheckedRequest, work: RoutedRequest) -> _Member:
        """Hold a request until the router has bound it."""
        left_s = None
        if job.timeout_s is not None:
            left_s = max(0.0, work.arrived_s + job.timeout_s - self._now_s())
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._held[work.request] = waiting
        self._router.hold(work)
        self._assign_soon()
        try:
            async with asyncio.timeout(left_s):
                return await waiting.worker
        except TimeoutError:
            late = f"timeout_s={job.timeout_s} ran out after 0 steps"
            raise DeadlineExceeded(late) from None
        finally:
            self._held.pop(work.request, None)

    def _assign_soon(self) -> None:
        """Ask the router once all that comes together is there."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._is_due = False
        for one in self._router.assign(self._now_s()):
            waiting = self._held.get(one.request)
            if waiting is not None and not waiting.worker.done():
                waiting.worker.set_result(self._members[one.worker])

    def _fail_held(self, error: CarpoolError) -> None:
        for waiting in list(self._held.values()):
            if not waiting.worker.done():
                waiting.worker.set_exception(error)

    # What workers say

    def worker_changed(self, member: _Member) -> None:
        """A worker takes requests, or no more."""
        is_open = member.handle.takes_requests
        self._router.open(member.number, is_open)
        if is_open:
            member.error, member.told_s = "", 0.0
            self._first_ready.set()
            for name, path in self._lora.items():
                member.handle.add_lora(name, path)
        self._open()
        self._assign_soon()

    def _open(self) -> None:
        if self._is_draining or self.state != "ready":
            self._is_open.clear()
        else:
            self._is_open.set()

    def worker_reported(self, member: _Member, report: protocol.Report) -> None:
        """A worker says what steps take, and what its requests have left."""
        tables: dict[Hashable, StepTable] = {
            self._kind(one.width, one.height, one.frames): tuple(one.seconds)
            for one in report.costs
        }
        self._router.learned(member.number, tables)
        known = ((self._numbers_of.get(name), left) for name, left in report.steps_left.items())
        steps = {number: left for number, left in known if number is not None}
        self._router.progressed(member.number, steps)
        share_s = self._router.held_for_s() if self._router.waiting else 0.0
        if abs(share_s - member.told_s) > 0.1 * max(share_s, member.told_s):
            member.told_s = share_s
            member.handle.hold(share_s)
        self._assign_soon()

    # For all workers

    def reload(self) -> None:
        """Have all workers read their adapter folder and batching config again."""
        for handle in self.handles:
            handle.reload()

    async def add_lora(self, name: str, path: str) -> None:
        """Register an adapter on all workers, and on those that replace them.

        Raises:
            LoraRejected: a worker says what is wrong with it; the others may have it.
        """
        self._lora[name] = path
        told = await asyncio.gather(*(handle.add_lora(name, path) for handle in self.handles))
        if problems := [problem for several in told for problem in several]:
            del self._lora[name]
            raise LoraRejected(problems[0])

    async def statistics(self) -> dict[str, Any]:
        """A lone worker's own; else sums, and those of every worker that is ready."""
        if self._is_alone:
            return await self._members[0].handle.statistics()
        self.check_open()
        several = [one async for one in self._statistics()]
        total = {
            key: sum(one[key] for one in several) for key in ("waiting", "running", "requests")
        }
        total["waiting"] += len(self._held)
        held = {"requests": len(self._held), "work_s": self._router.held_s, "stage": self._stage}
        return {**total, "held": held, "workers": several}

    async def _statistics(self) -> AsyncIterator[dict[str, Any]]:
        for member, shown in zip(self._members, self.workers(), strict=True):
            with contextlib.suppress(CarpoolError):  # it died, or loads
                if member.handle.state in ("ready", "draining"):
                    yield shown | await member.handle.statistics()

    async def estimate(self, job: CheckedRequest) -> protocol.Estimated:
        """What a request would take if it came now, on the worker that would start it first."""
        self.check_open()
        told = [await handle.estimate(job) for handle in self.handles if handle.state == "ready"]
        return min(told, key=lambda one: one.wait_s)

    def watch_activity(self, listener: OnActivity | None) -> None:
        """Tell a listener what the engines do; None: nobody any more."""
        for number, handle in enumerate(self.handles):
            seen = None if listener is None else partial(_numbered, listener, number)
            handle.watch_activity(seen)

    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The timelines of requests, of the worker that had each last."""
        if self._is_alone:
            return await self._members[0].handle.timelines(request_ids)
        self.check_open()
        found: dict[str, dict[str, Any]] = {}
        for handle in self.handles:
            with contextlib.suppress(CarpoolError):
                for one in await handle.timelines(request_ids):
                    found[one["id"]] = one
        return [found[name] for name in request_ids if name in found]

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _numbered(listener: OnActivity, number: int, activity: protocol.Activity) -> None:
    activity.worker = number
    listener(activity)
