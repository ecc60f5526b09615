"""What the server asks of what runs its requests, and a pool of each of its workers.

A server has a pool of workers, or a fleet of such pools; a worker is a `Supervisor` of a process
here, or what stands for one elsewhere. All methods are called on the event loop, and are as
`Supervisor` describes them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.requests import OnPreview, OnProgress
from carpool.worker.supervisor import OnActivity, State

ServingState = Literal["starting", "ready", "worker_lost", "draining", "stopped"]


class Service(Protocol):
    """What one worker and many have in common."""

    @property
    def ready(self) -> protocol.WorkerReady | None: ...
    def start(self) -> "asyncio.Task[None]": ...
    async def wait_ready(self) -> protocol.WorkerReady: ...
    async def wait_open(self) -> None: ...
    def check_open(self) -> None: ...
    def check_room(self) -> None: ...
    async def statistics(self) -> dict[str, Any]: ...
    async def estimate(self, job: CheckedRequest) -> protocol.Estimated: ...
    def watch_activity(self, listener: OnActivity | None) -> None: ...
    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]: ...
    def reload(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...
    async def stop(self) -> None: ...


class Serving(Service, Protocol):
    """Runs the requests of a server."""

    @property
    def state(self) -> ServingState: ...
    async def submit(
        self,
        job: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
    ) -> protocol.Done: ...


class WorkerHandle(Service, Protocol):
    """One worker of a pool, wherever it runs."""

    @property
    def state(self) -> State: ...
    @property
    def takes_requests(self) -> bool: ...
    async def run(
        self,
        job: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        *,
        waited_s: float = 0.0,
        deaths: int = 0,
    ) -> protocol.Done: ...
    async def retire(self) -> None: ...
    def hold(self, work_s: float) -> None: ...
    def add_lora(self, name: str, path: str) -> "asyncio.Future[list[str]]": ...
