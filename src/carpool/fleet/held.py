"""The queue of a pool: admission control, and requests that wait for a worker.

Reports of workers reach the router here. Numbers stand for requests and for workers.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from carpool.config import EngineSettings
from carpool.errors import CarpoolError, DeadlineExceeded, Overloaded, TooLate
from carpool.fleet.router import Router
from carpool.fleet.worker_load import RoutedRequest, StepTable, WorkerLoad
from carpool.request.card import Card
from carpool.schedule.overload import ENTER, Pressure, again_s, refuses, stage
from carpool.schedule.policy import weights
from carpool.types import CheckedRequest, RequestSize
from carpool.worker import protocol

log = logging.getLogger("carpool")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is held."""

    request: CheckedRequest
    worker: "asyncio.Future[int]"


class HeldRequests:
    """The queue of a pool, from a request's admission to its end.

    Args:
        settings: of each worker; what may wait and run counts for all of them together.
        card: of the model, once a worker has loaded it.
    """

    def __init__(self, settings: EngineSettings, card: Callable[[], Card | None]) -> None:
        self._settings, self._card = settings, card
        shares = weights(settings.fair_share)
        self.router = Router(min_gain=settings.min_gain, fair_share=shares)
        self._numbers = itertools.count(1)
        self._held: dict[int, _Waiting] = {}
        self._numbers_of: dict[str, int] = {}  # of requests in flight, by their ids
        self._is_due, self._stage = False, 0
        self._is_empty = asyncio.Event()  # nothing is in flight any more
        self._idle: dict[int, asyncio.Event] = {}  # workers that are to have nothing

    def __len__(self) -> int:
        """Requests in flight, held or bound."""
        return len(self._numbers_of)

    @property
    def stage(self) -> int:
        """Of overload; see `schedule.overload`."""
        return self._stage

    @property
    def held(self) -> int:
        """Requests that no worker has."""
        return len(self._held)

    def requests_of(self, worker: int) -> int:
        return len(self.router.workers[worker].bound)

    def add_worker(self, worker: int) -> None:
        """A worker is there, which takes no requests yet."""
        most = self._settings.max_running
        self.router.add_worker(WorkerLoad(worker, {}, most, is_open=False))

    def remove_worker(self, worker: int) -> None:
        """A worker without requests is gone."""
        self.router.remove_worker(worker)

    def check_room(self) -> None:
        """Refuse a request for which there is no room, before its body is read.

        Raises:
            Overloaded: as many requests are in flight as may run and wait.
        """
        settings = self._settings
        running = settings.max_running * len(self.router.workers)
        if len(self) >= running + settings.max_queue:
            raise Overloaded(
                f"the queue is full: {len(self)} requests wait or run, the most is "
                f"{running} + {settings.max_queue} (--max-running, --max-queue)",
                retry_after_s=min(max(self.router.held_for_s() / 10, 1.0), 120.0),
            )

    def admit(
        self, request: CheckedRequest, waited_s: float = 0.0
    ) -> tuple[CheckedRequest, RoutedRequest]:
        """Take a request, or refuse it as the engine would whose queue holds what is held here.

        Args:
            waited_s: how long it waited for the model to be loaded.

        Returns:
            The request as it is to be run, and as the router sees it. `end` ends it.

        Raises:
            Overloaded, TooLate: as the engine does.
        """
        work = self._routed(request, next(self._numbers), self._now_s() - waited_s)
        most_s = self._settings.max_wait
        pressure = self._pressure()
        if pressure.most >= ENTER[0] and self._is_due:  # some of it may be bound at once
            self._assign()
            pressure = self._pressure()
        self._stage = stage(self._stage, pressure)
        held, wait_s = len(self.router.waiting), pressure.wait * most_s
        if refuses(self._stage, request.priority) and pressure.fill < 1:
            which = "no new one" if self._stage == 3 else "none of priority below 0"
            raise Overloaded(
                f"the server is overloaded: {held} requests wait, with work for some "
                f"{wait_s:.3g} s (the most is {most_s:g} s, --max-wait): {which} is taken",
                retry_after_s=again_s(self._stage, wait_s, most_s),
            )
        needed_s = self.router.needed_s(work)
        if needed_s is not None:
            needed_s += waited_s
        if (
            request.deadline_s is not None
            and needed_s is not None
            and needed_s > request.deadline_s
        ):
            rule = f"cannot be met: it would take {needed_s:.3g} s"
            late = f"deadline_s={request.deadline_s:g} {rule}"
            if not self._settings.admit_late:
                fewer = "ask for fewer steps or a smaller size"
                raise TooLate(f"{late}; {fewer}", param="deadline_s")
            log.warning("request %s: %s", request.request_id, late)
        self._numbers_of[request.request_id] = work.request
        self._is_empty.clear()
        return (replace(request, previews=0) if self._stage else request), work

    def end(self, request: CheckedRequest, work: RoutedRequest) -> None:
        """A request that was admitted is answered, or given up."""
        del self._numbers_of[request.request_id]
        if not self._numbers_of:
            self._is_empty.set()
        self.drop(work)
        self.assign_soon()

    def drop(self, work: RoutedRequest) -> None:
        """No worker has the request any more, and it is not held."""
        self.router.drop(work.request)
        for worker, idle in self._idle.items():
            if not self.requests_of(worker):
                idle.set()

    async def wait_idle(self, worker: int) -> None:
        """Wait until a worker that takes no more requests has none."""
        if self.requests_of(worker):
            idle = self._idle[worker] = asyncio.Event()
            try:
                await idle.wait()
            finally:
                del self._idle[worker]

    async def wait_empty(self) -> None:
        """Wait until nothing is in flight."""
        if self._numbers_of:
            await self._is_empty.wait()

    def _pressure(self) -> Pressure:
        waiting = len(self.router.waiting)
        wait_s = self.router.held_for_s() if waiting else 0.0
        return Pressure(
            min(wait_s, 1e9) / self._settings.max_wait, waiting / max(1, self._settings.max_queue)
        )

    def _routed(self, request: CheckedRequest, number: int, now_s: float) -> RoutedRequest:
        card = self._card()
        assert card is not None
        deadline_s = float("inf") if request.deadline_s is None else now_s + request.deadline_s
        size = (request.arguments.get(name) for name in ("width", "height", "num_frames"))
        return RoutedRequest(
            number,
            self._kind(*size),
            max(1, card.steps(request.arguments)),
            now_s,
            deadline_s,
            request.priority,
            request.tenant,
            request.user,
        )

    def _kind(self, width: int | None, height: int | None, frames: int | None) -> RequestSize:
        """The size of a request, with the default where it says none."""
        card = self._card()
        default = (card.default_size_px if card else None) or (None, None)
        return width or default[0], height or default[1], frames

    async def bound(
        self, request: CheckedRequest, work: RoutedRequest, to: int | None = None
    ) -> int:
        """Hold a request until the router has bound it; returns the worker.

        Args:
            to: the worker that gets it at once, if it takes requests.

        Raises:
            DeadlineExceeded: its `timeout_s` ran out.
        """
        left_s = None
        if request.timeout_s is not None:
            left_s = max(0.0, work.arrived_s + request.timeout_s - self._now_s())
        self.router.hold(work)
        if to is not None and self.router.bind_to(work.request, to):
            return to
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._held[work.request] = waiting
        self.assign_soon()
        try:
            async with asyncio.timeout(left_s):
                return await waiting.worker
        except TimeoutError:
            late = f"timeout_s={request.timeout_s} ran out after 0 steps"
            raise DeadlineExceeded(late) from None
        finally:
            self._held.pop(work.request, None)

    def assign_soon(self) -> None:
        """Ask the router once all that comes together is there."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._is_due = False
        for one in self.router.assign(self._now_s()):
            waiting = self._held.get(one.request)
            if waiting is not None and not waiting.worker.done():
                waiting.worker.set_result(one.worker)

    def fail(self, error: CarpoolError) -> None:
        """Fail all that is held."""
        for waiting in list(self._held.values()):
            if not waiting.worker.done():
                waiting.worker.set_exception(error)

    def reported(self, worker: int, report: protocol.Report) -> float:
        """A worker says what steps take, and what its requests have left.

        Returns:
            Predicted seconds of its part of the work that is held.
        """
        tables: dict[Hashable, StepTable] = {
            self._kind(one.width, one.height, one.frames): tuple(one.seconds)
            for one in report.costs
        }
        self.router.learned(worker, tables, shares_sweeps=report.shares_sweeps)
        known = ((self._numbers_of.get(name), left) for name, left in report.steps_left.items())
        steps = {number: left for number, left in known if number is not None}
        self.router.progressed(worker, steps, self._now_s())
        return self.router.part_s()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
