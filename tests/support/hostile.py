"""The real application before a worker that is none: it draws grey, and keeps what it was told."""

import asyncio
import atexit
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx2
from fastapi import FastAPI

from carpool.config import EngineSettings, ServeSettings
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.request.parameters import Card, Parameter, Task
from carpool.server.app import create_app
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from carpool.worker.supervisor import Supervisor

ENDPOINT = "/v1/images/generations"
CARD = Card(
    id="grey",
    tasks=(
        Task(
            "text-to-image",
            "GreyPipeline",
            (
                Parameter("prompt", "str"),
                Parameter("negative_prompt", "str"),
                Parameter("width", "int"),
                Parameter("height", "int"),
                Parameter("num_inference_steps", "int", default=4),
                Parameter("guidance_scale", "float", default=3.5),
                Parameter("true_cfg_scale", "float", default=1.0),
                Parameter("strength", "float", default=0.6),
                Parameter("num_frames", "int"),
                Parameter("sigmas", "numbers"),
                Parameter("clip_skip", "bool"),
                Parameter("latents", "other"),
            ),
        ),
    ),
    defaults={},
    size_multiple_px=16,
    default_size_px=(64, 64),
    max_pixels=2048 * 2048,
    max_steps=100,
    lora=("outlined",),
)


class Grey(Supervisor):
    """Draws at once, or never."""

    def __init__(self, *, is_slow: bool = False) -> None:
        super().__init__("none", EngineSettings())
        self.ready, self._state = protocol.WorkerReady(CARD, {}, 0.0), "ready"
        self.jobs: list[CheckedRequest] = []
        self.is_slow, self.running = is_slow, 0
        self.changed = asyncio.Event()  # `running` has another value

    async def submit(self, job: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        self.jobs.append(job)
        self._count(+1)
        try:
            if self.is_slow:
                await asyncio.Event().wait()
        finally:
            self._count(-1)
        picture = protocol.Picture(16, 16, b"\x80" * 3 * 16 * 16)
        return protocol.Done(
            job.request_id, job.seed, [picture], Timings(), protocol.TokenUsage(1, 1)
        )

    def _count(self, by: int) -> None:
        self.running += by
        self.changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()


def app_of(worker: Grey, **settings: Any) -> FastAPI:
    return create_app(worker, ServeSettings(port=0, **settings))


@cache
def plain() -> FastAPI:
    """The application with all its routes, those of jobs too; nobody runs these."""
    worker, store = Grey(), JobStore(None, ttl_s=1000, max_bytes=1 << 20, max_waiting=1000)
    atexit.register(store.close)
    runner = Runner(store, worker, {}, model=lambda: CARD.id, max_running=1)
    return create_app(worker, ServeSettings(port=0), runner)


def ask(
    content: bytes | str,
    path: str = ENDPOINT,
    *,
    worker: Grey | None = None,
    headers: Any = (),
    method: str = "POST",
    **settings: Any,
) -> httpx2.Response:
    """Send one request to the application; an exception that leaves it fails the test."""
    sent = {"content-type": "application/json", **dict(headers)}

    async def talk() -> httpx2.Response:
        is_plain = worker is None and not settings
        app = plain() if is_plain else app_of(worker or Grey(), **settings)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=content, headers=sent)

    return asyncio.run(talk())


def refusal(answer: httpx2.Response) -> dict[str, Any]:
    """The error in an answer, once it is known to be the caller's fault, short and of our shape."""
    assert 400 <= answer.status_code < 500, answer.text
    told: dict[str, Any] = answer.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert 0 < len(told["message"]) < 300
    assert answer.headers["x-request-id"]
    return told
