"""The real application in the test's own process: before a fake worker.

`Grey` draws grey and keeps what it was told (`engine_worker.py` has a worker that draws). No worker
process, no sockets, no torch.
"""

import asyncio
import atexit
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import openai
from fastapi import FastAPI

from carpool.config import EngineSettings, ServeSettings
from carpool.fleet.deployment import Deployment
from carpool.fleet.fleet import Fleet
from carpool.fleet.pool import OnActivity
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.media.inputs import unpacked
from carpool.request.card import Card, Parameter, Task
from carpool.server.access.keys import Keyring
from carpool.server.app import create_app
from carpool.server.compat import dialects
from carpool.server.routes.artifacts import write_mesh, write_sound
from carpool.server.routes.jobs import write_images
from carpool.server.routes.videos import write_video
from carpool.server.state import AppState
from carpool.server.transport.middleware import RequestLogging
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from carpool.worker.connection import LocalConnector
from carpool.worker.supervisor import Supervisor
from support.endpoints import ENDPOINT
from support.server_process import eventually

PARAMETERS = (
    Parameter("prompt", "str"), Parameter("negative_prompt", "str"),
    Parameter("width", "int"), Parameter("height", "int"),
    Parameter("num_inference_steps", "int", default=4),
    Parameter("guidance_scale", "float", default=3.5),
    Parameter("true_cfg_scale", "float", default=1.0),
    Parameter("strength", "float", default=0.6), Parameter("num_frames", "int"),
    Parameter("sigmas", "numbers"), Parameter("clip_skip", "bool"), Parameter("latents", "other"),
)  # fmt: skip
TASK = Task("text-to-image", "GreyPipeline", PARAMETERS)
CARD = Card("grey", (TASK,), {}, 16, (64, 64), 2048 * 2048, max_steps=100, lora=("outlined",))


class Lone(Supervisor):
    """A worker that serves in place of a pool, and has no process."""

    has_several, is_degraded, ranks = False, False, 1
    lora_dir: str | None = None

    def __init__(self) -> None:
        super().__init__(protocol.LoadModel("none", EngineSettings()), LocalConnector())
        self.is_open, self.handles, self.private_tasks = asyncio.Event(), [self], dict[str, str]()
        self._on_activity: OnActivity | None = None

    def watch_activity(self, listener: OnActivity | None) -> None:
        self._on_activity = listener

    async def wait_open(self, model: str | None = None) -> None:
        await self.is_open.wait()

    def check_room(self, tenant: str = "") -> None:
        pass

    async def drain(self, timeout_s: float) -> None:
        pass


class Grey(Lone):
    """Draws at once, or never."""

    def __init__(self, *, is_slow: bool = False) -> None:
        super().__init__()
        self.ready, self._state = protocol.WorkerReady(CARD, {}, 0.0), "ready"
        self.jobs: list[CheckedRequest] = []
        self.is_slow, self.running = is_slow, 0
        self.changed = asyncio.Event()  # `running` has another value

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        self.jobs.append(request)
        self._count(+1)
        try:
            if self.is_slow:
                await asyncio.Event().wait()
        finally:
            self._count(-1)
        picture = protocol.Picture(16, 16, b"\x80" * 3 * 16 * 16)
        return protocol.Done(
            request.request_id, request.seed, [picture], Timings(), protocol.TokenUsage(1, 1),
            warnings=list(request.warnings),
        )  # fmt: skip

    def _count(self, by: int) -> None:
        self.running += by
        self.changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()


def fleet_of(*workers: Any, names: Sequence[str] = ("",)) -> Fleet:
    """A fleet with these workers, or pools, of one model each; None: not loaded yet."""
    make: Any = None
    pools = zip(names, workers, strict=True)
    return Fleet([Deployment(name, make, pool is None, pool=pool) for name, pool in pools])


def client_of(app: Any, url: str = "http://localhost", **options: Any) -> httpx2.AsyncClient:
    """A client of an application, whose defects raise here."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=url, **options)


@cache
def _store() -> JobStore:
    store = JobStore()
    atexit.register(store.close)
    return store


def idle_jobs() -> Runner:
    """Jobs that wait: no test runs them. The tests of a process share their store."""
    return Runner(_store(), Grey(), {}, model=lambda: CARD.id, max_running=1)


_IDLE: dict[ServeSettings, list[FastAPI]] = defaultdict(list)


@contextmanager
def lent_app(
    worker: Grey, settings: ServeSettings, runner: Runner | None = None, keys: Keyring | None = None
) -> Iterator[FastAPI]:
    """An application with a state of its own, and with the routes of an earlier one.

    FastAPI builds those at the first request: it takes four times as long as the answer.
    """
    idle, runner = _IDLE[settings], runner or idle_jobs()
    fleet = fleet_of(worker, names=[settings.served_model_name or ""])
    worker.lora_dir = settings.lora_dir
    if idle:
        app = idle.pop()
        app.state.server = AppState(fleet, settings, runner, keys, None, dialects.translated)
    else:
        app = create_app(fleet, settings, runner, keys=keys)
        for middleware in map(vars, app.user_middleware):
            if middleware["cls"] is RequestLogging:
                count = lambda *said: app.state.server.observer.answered(*said)  # noqa: E731
                middleware["kwargs"]["count"] = count
    yield app
    idle.append(app)


def app_of(worker: Grey, **settings: Any) -> FastAPI:
    worker.lora_dir = settings.get("lora_dir")
    return create_app(fleet_of(worker), ServeSettings(port=0, **settings), idle_jobs())


@cache
def shared_app() -> FastAPI:
    return app_of(Grey())


def answer_of(
    app: FastAPI, method: str, path: str, url: str = "http://localhost", **request: Any
) -> httpx2.Response:
    """An application's answer to one request; an exception that leaves it fails the test."""

    async def talk() -> httpx2.Response:
        async with client_of(app, url) as client:
            return await client.request(method, path, **request)

    return asyncio.run(talk())


def ask(
    content: bytes | str,
    path: str = ENDPOINT,
    *,
    worker: Grey | None = None,
    headers: Any = (),
    method: str = "POST",
    **settings: Any,
) -> httpx2.Response:
    """Send one request to an application with these settings."""
    sent = {"content-type": "application/json", **dict(headers)}
    if worker is None and not settings:
        return answer_of(shared_app(), method, path, content=content, headers=sent)
    with lent_app(worker or Grey(), ServeSettings(port=0, **settings)) as app:
        return answer_of(app, method, path, content=content, headers=sent)


def refusal(answer: httpx2.Response) -> dict[str, Any]:
    """The error in an answer, once it is known to be the caller's fault, short and of our shape."""
    assert 400 <= answer.status_code < 500, answer.text
    told: dict[str, Any] = answer.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert 0 < len(told["message"]) < 300
    assert answer.headers["x-request-id"]
    return told


@dataclass(slots=True)
class AppClient:
    """An application that can be talked to."""

    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI
    runner: Runner

    async def ended(self, job_id: str) -> dict[str, Any]:
        """A job as `/v1/jobs` shows it at its end."""
        async with asyncio.timeout(30):
            await self.runner.ended(job_id)
        job: dict[str, Any] = (await self.http.get(f"/v1/jobs/{job_id}")).json()
        return job

    async def files(self, job: dict[str, Any]) -> list[bytes]:
        return [(await self.http.get(file["url"])).content for file in job["files"]]

    def inputs(self) -> list[str]:
        """What jobs begin from, as it lies on the disk."""
        return sorted(path.name for path in (self.runner.store.folder / "inputs").rglob("*.png"))

    async def inputs_are_gone(self) -> None:
        """They are removed once the end is on the disk: a moment after it shows."""
        await asyncio.to_thread(eventually, lambda: not self.inputs(), 10, "they are gone")


@asynccontextmanager
async def open_app(
    worker: Grey,
    folder: Path | None = None,
    *,
    runs: bool = True,
    keys: Keyring | None = None,
    **settings: Any,
) -> AsyncIterator[AppClient]:
    """Open the application with its jobs.

    Args:
        folder: of the store; None: in memory.
        runs: are its jobs run? Else they wait.
        keys: those of a file; None: the settings' own.
        settings: of `ServeSettings`.
    """
    store = JobStore(folder)
    writers = {"image": write_images, "video": write_video}
    writers |= {"mesh": write_mesh, "sound": write_sound}
    assert worker.ready is not None
    name = worker.ready.card.id
    runner = Runner(
        store, worker, writers, model=lambda: name, max_running=1, read=unpacked, again_s=0.01
    )
    worker.is_open.set()
    running = asyncio.create_task(runner.run()) if runs else None
    chosen = ServeSettings(port=0, **settings)
    try:
        with lent_app(worker, chosen, runner, keys) as app:
            async with client_of(app, timeout=60) as http:
                sdk = openai.AsyncOpenAI(
                    base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
                )
                yield AppClient(http, sdk, runner)
    finally:
        if running is not None:
            running.cancel()
        await runner.stop()
        store.close()


def without_nulls(value: Any) -> Any:
    """JSON without the members of objects that are null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def parts(link: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"/v1/files/(.+)\?expires=(.+)&signature=(.+)", link)
    assert match is not None
    return match[1], match[2], match[3]
