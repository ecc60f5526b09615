"""The real application with its jobs, before a real engine in the test's own thread.

No worker process and no sockets: requests go through the application, jobs through store and
runner, and the engine is driven until it has nothing left to do.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai

from carpool.config import ServeSettings
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.media.inputs import unpacked
from carpool.server.app import create_app
from carpool.server.routes.jobs import write_images
from carpool.server.routes.videos import write_video
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from support.engines import Drive, Recorder
from support.hostile import Grey


class Driven(Grey):
    """Runs each job on the engine before it lets anything else happen."""

    def __init__(self, drive: Drive) -> None:
        super().__init__()
        self._drive = drive
        self.ready = protocol.WorkerReady(drive.engine.loaded.card, {}, 0.0)

    async def submit(self, job: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        self.jobs.append(job)
        recorder = Recorder()
        self._drive.engine.submit(job, recorder)
        self._drive.finish()
        if recorder.error is not None:
            raise recorder.error
        fields = recorder.outcome.fields
        done = protocol.Done(job.request_id, job.seed, [], Timings(), protocol.TokenUsage(1, 1))
        if "frames" in fields:
            video = np.stack([np.asarray(frame.convert("RGB")) for frame in fields["frames"][0]])
            length, height, width, _ = video.shape
            done.clip = protocol.RawVideo(width, height, length, video.tobytes())
        else:
            images = (image.convert("RGB") for image in fields["images"])
            done.pictures = [
                protocol.Picture(one.width, one.height, one.tobytes()) for one in images
            ]
        return done


@dataclass(slots=True)
class House:
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


@asynccontextmanager
async def open_house(
    worker: Grey, folder: Path | None = None, *, runs: bool = True, **settings: Any
) -> AsyncIterator[House]:
    """Open the application with its jobs.

    Args:
        folder: of the store; None: in memory.
        runs: are its jobs run? Else they wait.
        settings: of `ServeSettings`.
    """
    store = JobStore(folder)
    writers = {"image": write_images, "video": write_video}
    assert worker.ready is not None
    name = worker.ready.card.id
    runner = Runner(
        store, worker, writers, model=lambda: name, max_running=1, read=unpacked, again_s=0.01
    )
    app = create_app(worker, ServeSettings(port=0, **settings), runner)
    worker._is_open.set()
    running = asyncio.create_task(runner.run()) if runs else None
    try:
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://localhost", timeout=60
        ) as http:
            sdk = openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
            )
            yield House(http, sdk, runner)
    finally:
        if running is not None:
            running.cancel()
        await runner.stop()
        store.close()
