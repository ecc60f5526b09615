"""The queue of a pool: admission control, and requests that wait for a worker.

Requests and workers are identified by numbers, as in the router.
"""

import asyncio
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from math import inf

from carpool.config import EngineSettings
from carpool.errors import CarpoolError, DeadlineExceeded
from carpool.fleet.moves import Move
from carpool.fleet.router import Router
from carpool.fleet.worker_load import RoutedRequest, StepTable, WorkerLoad
from carpool.request.card import TEXT, Card
from carpool.request.enhancement import writer_of
from carpool.schedule.overload import ENTER, Overload, check_room
from carpool.schedule.policy import weights
from carpool.types import CheckedRequest, RequestSize
from carpool.worker import protocol
from carpool.worker.guilt import CrashEvidence


@dataclass(slots=True, eq=False)
class PoolRequest:
    """One request of a pool, from its admission to its end: waiting, or bound to a worker.

    It waits again when its worker dies or releases it.
    """

    request: CheckedRequest
    work: RoutedRequest  # the router's view
    is_admitted: bool  # its worker must not refuse it
    # about workers that died while running it
    evidence: CrashEvidence = field(default_factory=CrashEvidence)
    worker: "asyncio.Future[int] | None" = None  # set while it waits; resolves to its worker
    move: Move | None = None  # the move for which its worker releases it

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def number(self) -> int:
        return self.work.request


class PoolQueue:
    """The requests of a pool, from their admission to their end.

    Args:
        settings: each worker's settings; queue and concurrency limits are for the whole pool.
        card: returns the model's card, once a worker has loaded the model.
        is_choice: as in `Router`. A single worker has the queue and refuses late requests itself.
    """

    def __init__(
        self, settings: EngineSettings, card: Callable[[], Card | None], *, is_choice: bool = True
    ) -> None:
        self._settings, self._card, self._is_choice = settings, card, is_choice
        shares = weights(settings.fair_share) if is_choice else None
        self.router = Router(min_gain=settings.min_gain, fair_share=shares, is_choice=is_choice)
        self._texts: dict[str, tuple[float, list[float]]] = {}  # latest reports, by writer
        self._places_s: dict[int, float] = {}  # predicted seconds until a free place, by worker
        self.requests: dict[int, PoolRequest] = {}  # requests in flight, by number
        self._numbers = itertools.count(1)
        self._overload = Overload(settings.max_wait, admits_late=settings.admit_late)
        self._is_due = False
        self._dropped = asyncio.Event()  # wakes its waiters when a request leaves its worker

    @property
    def stage(self) -> int:
        """The overload stage; see `schedule.overload`."""
        return self._overload.stage

    def __len__(self) -> int:
        """The number of requests in flight, waiting or bound."""
        return len(self.requests)

    @property
    def held(self) -> int:
        """The number of waiting requests."""
        return sum(entry.worker is not None for entry in self.requests.values())

    def requests_of(self, worker: int) -> int:
        return len(self.router.workers[worker].bound)

    def add_worker(self, worker: int) -> None:
        """Add a worker that does not accept requests yet."""
        limit = self._settings.max_running
        self.router.add_worker(WorkerLoad(worker, {}, limit, is_open=False))

    def remove_worker(self, worker: int) -> None:
        """Remove a worker without requests."""
        self.router.remove_worker(worker)
        self._places_s.pop(worker, None)

    def check_room(self, tenant: str = "") -> None:
        """Refuse a request before its body is read if there is no free place.

        Args:
            tenant: the request's tenant, if tenants share the places; empty: none.

        Raises:
            Overloaded: the pool's, or the tenant's, limit of requests in flight is reached.
        """
        own_requests = None
        if tenant and self._settings.fair_share:
            own_requests = sum(entry.request.tenant == tenant for entry in self.requests.values())
        running = self._settings.max_running * len(self.router.workers)
        again_s = min(self._places_s.values(), default=1.0)
        check_room(len(self), running, self._settings.max_queue, again_s, occupied=own_requests)

    def admit(
        self, request: CheckedRequest, waited_s: float = 0.0, *, has_begun: bool = False
    ) -> PoolRequest:
        """Admit a request, or refuse it like an engine with the same queue.

        Args:
            waited_s: seconds it waited for the model to load.
            has_begun: an earlier server accepted it, with its deadline.

        Returns:
            The request in flight, with previews if there is no overload. `end` ends it.

        Raises:
            Overloaded, TooLate: as in the engine.
        """
        work = self._routed(request, self._now_s() - waited_s)
        if self._is_choice:
            self._check_backlog(request, work, waited_s, has_begun=has_begun)
        request = replace(request, previews=0) if self.stage else request
        entry = PoolRequest(request, work, is_admitted=self._is_choice or has_begun)
        self.requests[entry.number] = entry
        return entry

    def _check_backlog(
        self, request: CheckedRequest, work: RoutedRequest, waited_s: float, *, has_begun: bool
    ) -> None:
        """Refuse a request because of the queue."""
        wait_s, fill = self._backlog()
        if self._is_due and max(wait_s / self._settings.max_wait, fill) >= ENTER[0]:
            self._assign()  # some requests may be bound now
            wait_s, fill = self._backlog()
        self._overload.update(wait_s, fill)
        waiting = len(self.router.queue)
        self._overload.check_wait(request.priority, waiting=waiting, wait_s=wait_s, fill=fill)
        needed_s = self.router.needed_s(work)
        if request.deadline_s is not None and needed_s is not None and not has_begun:
            due_s, needed_s = request.deadline_s, needed_s + waited_s
            self._overload.check_deadline(request.request_id, due_s, needed_s)

    def end(self, entry: PoolRequest) -> None:
        """Remove a request that was answered or given up."""
        del self.requests[entry.number]
        self.drop(entry)
        self.assign_soon()

    def drop(self, entry: PoolRequest) -> None:
        """Remove a request from its worker and from the queue."""
        self.router.drop(entry.number)
        self._dropped.set()
        self._dropped.clear()

    async def wait_idle(self, worker: int) -> None:
        """Wait until a closed worker has no requests."""
        while self.requests_of(worker):
            await self._dropped.wait()

    async def wait_empty(self) -> None:
        """Wait until no request is in flight."""
        while self.requests:
            await self._dropped.wait()

    def _backlog(self) -> tuple[float, float]:
        """Predicted seconds of the queued work, and the used share of the queue's places."""
        waiting = len(self.router.queue)
        wait_s = min(self.router.held_for_s(), 1e9) if waiting else 0.0
        return wait_s, waiting / max(1, self._settings.max_queue)

    def _routed(self, request: CheckedRequest, now_s: float) -> RoutedRequest:
        card = self._card()
        assert card is not None
        size = (request.arguments.get(name) for name in ("width", "height", "num_frames"))
        kind: Hashable = self._size(*size)
        steps = max(1, card.steps(request.arguments))
        usual, [token_s, *_] = self._texts.get(writer_of(request), (0.0, [0.0]))
        tokens = min(request.arguments.get("max_new_tokens") or usual, usual)
        if request.task.startswith(TEXT):
            kind, steps = writer_of(request), max(1, round(tokens))
        else:  # a text before a drawing counts as the steps that take as long
            steps += round(tokens * token_s / self.router.step_s(kind))
        due_s = inf if request.deadline_s is None else now_s + request.deadline_s
        return RoutedRequest(
            next(self._numbers), now_s, deadline_s=due_s, priority=request.priority,
            tenant=request.tenant, user=request.user, kind=kind, steps=steps,
        )  # fmt: skip

    def _size(self, width: int | None, height: int | None, frames: int | None) -> RequestSize:
        """The size of a request, with the model's default."""
        card = self._card()
        default = (card.usual_size_px if card else None) or (None, None)
        return width or default[0], height or default[1], frames

    async def bound(self, entry: PoolRequest, to: int | None = None) -> int:
        """Queue a request until the router has bound it; returns the worker.

        Args:
            to: a worker that gets it at once, if open.

        Raises:
            DeadlineExceeded: its `timeout_s` ran out.
        """
        timeout_s, left_s = entry.request.timeout_s, None
        if timeout_s is not None:
            left_s = max(0.0, entry.work.arrived_s + timeout_s - self._now_s())
        self.router.hold(entry.work)
        if to is not None and self.router.bind_to(entry.number, to):
            return to
        entry.worker = asyncio.get_running_loop().create_future()
        self.assign_soon()
        try:
            async with asyncio.timeout(left_s):
                return await entry.worker
        except TimeoutError:
            raise DeadlineExceeded(f"timeout_s={timeout_s} ran out after 0 steps") from None
        finally:
            entry.worker = None

    def assign_soon(self) -> None:
        """Schedule one router run for all requests that arrive together."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._is_due = False
        for binding in self.router.assign(self._now_s()):
            entry = self.requests.get(binding.request)
            if entry is not None and entry.worker is not None and not entry.worker.done():
                entry.worker.set_result(binding.worker)

    def fail(self, error: CarpoolError) -> None:
        """Fail all waiting requests."""
        for entry in self.requests.values():
            if entry.worker is not None and not entry.worker.done():
                entry.worker.set_exception(error)

    def of(self, worker: int) -> list[PoolRequest]:
        """The requests bound to a worker."""
        return [self.requests[number] for number in self.router.workers[worker].bound]

    def reported(self, worker: int, report: protocol.Report) -> float:
        """Handle a report: seconds of steps and tokens, and remaining steps of requests.

        Returns:
            Predicted seconds of its share of the backlog.
        """
        tables: dict[Hashable, StepTable] = {
            self._size(*size): tuple(seconds) for size, seconds in report.step_costs.items()
        }
        self._texts.update(report.text_costs)
        tables |= {writer: tuple(seconds) for writer, (_, seconds) in report.text_costs.items()}
        self.router.learned(worker, tables, shares_sweeps=report.shares_sweeps)
        rest = report.steps_left
        requests = [entry for entry in self.of(worker) if entry.request_id in rest]
        steps = {entry.number: rest[entry.request_id] for entry in requests}
        if report.place_s is not None:
            self._places_s[worker] = report.place_s
        self.router.progressed(worker, steps, self._now_s())
        return self.router.part_s()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
