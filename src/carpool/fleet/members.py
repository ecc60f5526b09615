"""The workers of a pool: their numbers and devices, and calls to all of them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from carpool.errors import CarpoolError, LoraRejected, Starting, WorkerLost
from carpool.worker import protocol
from carpool.worker.supervisor import Supervisor, WorkerListener, WorkerState

if TYPE_CHECKING:
    from carpool.fleet.pool import Pool

log = logging.getLogger("carpool")

MakeWorker = Callable[[str, WorkerListener], Supervisor]
"""Creates the worker of a device."""

_DIFFERS = (
    "its file was changed while the server ran, and workers have read different ones: give the new "
    "file another name, or have all workers replaced (SIGUSR2)"
)
_ORDER: tuple[WorkerState, ...] = ("ready", "draining", "starting", "worker_lost", "stopped")


class Member(WorkerListener):
    """One worker of a pool.

    Args:
        pool: receives its changes and reports.
    """

    def __init__(self, pool: "Pool", number: int, device: str, make: MakeWorker) -> None:
        self._pool, self.number, self.device = pool, number, device
        self.adapters = pool.adapters
        self.handle = make(device, self)
        self.error = ""  # its load error
        self.has_failed = asyncio.Event()  # loading failed
        self.was_ready = False
        self.told_s = 0.0  # its share of the backlog, as last sent to it
        self.is_leaving = False  # gets no new requests
        self.private: dict[str, str] = {}  # reasons for private rides there, by task

    def changed(self) -> None:
        self._pool.worker_changed(self)

    def reported(self, report: protocol.Report) -> None:
        self.private = report.private
        self._pool.worker_reported(self, report)

    def acted(self, activity: protocol.Activity) -> None:
        activity.worker = self.number
        self._pool.worker_acted(activity)


class Members:
    """The workers of a pool, by number."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self.adapters: dict[str, str] = {}  # registered since the start: paths by name
        self._last_ready: protocol.WorkerReady | None = None
        self._differing: Set[str] = frozenset()  # ids of conflicting adapters
        self._refusing: tuple[protocol.WorkerReady, protocol.WorkerReady] | None = None
        self._warned_of: dict[str, list[str]] = {}  # workers by model, at the last warning

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, number: int) -> Member:
        return self._members[number]

    def add(self, member: Member) -> None:
        self._members[member.number] = member

    def remove(self, member: Member) -> None:
        del self._members[member.number]

    @property
    def handles(self) -> list[Supervisor]:
        return [member.handle for member in self]

    @property
    def ready(self) -> protocol.WorkerReady | None:
        """The model as served by the oldest worker that loaded it."""
        for handle in self.handles:
            if handle.ready is not None:
                self._last_ready = handle.ready
                break
        return self._last_ready if self._last_ready is None else self._consistent(self._last_ready)

    def _consistent(self, ready: protocol.WorkerReady) -> protocol.WorkerReady:
        """The model without adapters whose files differ between workers."""
        if not self._differing:
            return ready
        if self._refusing is None or self._refusing[0] is not ready:
            card, ids = ready.card, self._differing
            lora = tuple(id_ for id_ in card.lora if id_ not in ids)
            refused = ((replace(a, problem=_DIFFERS) if a.id in ids else a) for a in card.adapters)
            card = replace(card, lora=lora, adapters=tuple(refused))
            self._refusing = ready, ready.now(card)
        return self._refusing[1]

    @property
    def state(self) -> WorkerState:
        """The best state of any worker."""
        states: set[WorkerState] = {handle.state for handle in self.handles}
        return next((state for state in _ORDER if state in states), "stopped")

    def model_of(self, number: int) -> str:
        """A digest of the model that a worker loaded last; empty: unknown."""
        member = self._members.get(number)
        ready = member.handle.ready if member is not None else None
        return ready.model_digest if ready is not None else ""

    def compare_models(self, *, is_rolling: bool) -> None:
        """Log that workers have loaded different models, once for each change.

        Args:
            is_rolling: a rolling update is in progress: differences are expected.
        """
        numbers: dict[str, list[str]] = {}
        for member in self:
            if (digest := self.model_of(member.number)) and not member.is_leaving:
                numbers.setdefault(digest, []).append(str(member.number + 1))
        if len(numbers) > 1 and numbers != self._warned_of and not is_rolling:
            log.warning(
                "workers have loaded different models (%s): their files, libraries or kinds of "
                "device differ; which one a request gets is open; SIGUSR2 replaces all workers",
                " | ".join(", ".join(group) for group in numbers.values()),
            )
        self._warned_of = numbers

    def compare_adapters(self, *, is_rolling: bool) -> None:
        """Find ids of adapters whose files differ between workers, and refuse them.

        Args:
            is_rolling: a rolling update is in progress: differences are expected.
        """
        digests = dict[str, set[str]]()
        for member in self:
            ready = member.handle.ready
            if ready is not None and member.handle.takes_requests and not member.is_leaving:
                for adapter in ready.card.adapters:
                    digests.setdefault(adapter.id, set()).add(adapter.digest)
        conflicts = {id_ for id_, versions in digests.items() if len(versions - {""}) > 1}
        self._differing, self._refusing = frozenset[str]() if is_rolling else conflicts, None
        if self._differing:
            log.error("adapters %s: %s", ", ".join(sorted(self._differing)), _DIFFERS)

    def check_open(self, was_ready: bool, again_s: float) -> None:
        """Raise the error of the worker that will accept requests soonest.

        Args:
            again_s: seconds until failed workers load again.
        """
        failed = [member.error for member in self if member.error]
        if failed and len(failed) == len(self):
            text = f"the model cannot be loaded now: {failed[0]}; it is tried again"
            raise Starting(text, retry_after_s=again_s)
        errors = []
        for handle in self.handles:
            try:
                handle.check_open()
            except CarpoolError as error:
                errors.append(error)
        if errors:
            first = min(errors, key=lambda error: error.retry_after_s or 0.0)
            losses = (error for error in errors if isinstance(error, WorkerLost))
            raise next(losses, first) if was_ready else first

    async def add_lora(self, name: str, path: str) -> None:
        """Register an adapter on all workers, and on their successors.

        Raises:
            LoraRejected: a worker rejected it, with the reason; others may have it.
        """
        self.adapters[name] = path
        try:
            answers = await asyncio.gather(*(h.add_lora(name, path) for h in self.handles))
        except asyncio.CancelledError:  # the caller has reported a failure
            del self.adapters[name]
            raise
        if problems := [problem for answer in answers for problem in answer]:
            del self.adapters[name]
            raise LoraRejected(problems[0])

    async def statistics(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Sums, and for every ready worker its row and its statistics."""
        workers = list[dict[str, Any]]()
        for member, row in zip(self, rows, strict=True):
            with contextlib.suppress(CarpoolError):  # it died or is loading
                if member.handle.state in ("ready", "draining"):
                    workers.append(row | await member.handle.statistics())
        keys = ("waiting", "running", "requests")
        return {**{key: sum(worker[key] for worker in workers) for key in keys}, "workers": workers}

    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The timelines of requests, from the last worker of each."""
        timelines: dict[str, dict[str, Any]] = {}
        for handle in self.handles:
            with contextlib.suppress(CarpoolError):
                for timeline in await handle.timelines(request_ids):
                    before = timelines.setdefault(timeline["id"], timeline)
                    if timeline.get("submitted_at", 0.0) > before.get("submitted_at", 0.0):
                        timelines[timeline["id"]] = timeline  # a later worker of the request
        return [timelines[name] for name in request_ids if name in timelines]
