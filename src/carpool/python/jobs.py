"""Jobs without a server: `engine.jobs` accepts work at once and turns it into files.

It has the store and the runner of `carpool serve`, over the engine of this process. They have
their own event loop, in a thread that starts with the first call, or at once if the folder has open
jobs of an earlier process: these run again from the start, with their seeds.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from carpool.config import ServeSettings
from carpool.errors import Draining
from carpool.jobs.database import JobState, Record
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.media.inputs import packed, unpacked
from carpool.python.files import write_job
from carpool.python.handle import Loop
from carpool.python.in_process import KINDS, InProcess, checked, work_and_kind
from carpool.types import Request

log = logging.getLogger("carpool")

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """Snapshot of a job."""

    id: str
    state: JobState
    progress: int  # percent; never falls
    seeds: Sequence[int]  # one for each output
    error: dict[str, Any] | None  # code, message, param, type: as over HTTP
    files: Sequence[Path]  # in the order of the seeds; completed jobs only
    warnings: Sequence[str] = ()  # for example a truncated prompt


def open_store(settings: ServeSettings) -> JobStore:
    """The store of the settings, or a store in memory.

    Raises:
        StoreFailed: its folder is unusable, or another process uses it.
    """
    folder = None if settings.state_dir in (None, "none") else Path(str(settings.state_dir))
    return JobStore.of(folder and folder.expanduser(), settings)


class Jobs:
    """The jobs of one engine. Thread-safe."""

    def __init__(
        self, loop: Loop, is_alive: Callable[[], bool], settings: ServeSettings, store: JobStore
    ) -> None:
        """Resume the jobs of a store; `close` also closes the store."""
        self._loop, self._settings, self._store = loop, settings, store
        self._runner = Runner(
            store, InProcess(loop, is_alive), dict.fromkeys(KINDS.values(), write_job),
            model=lambda: loop.loaded.card.id, max_running=settings.max_running, read=unpacked,
        )  # fmt: skip
        self._changing, self._is_up, self._is_closed = Lock(), Event(), False
        self._thread: Thread | None = None
        self._here: asyncio.AbstractEventLoop
        if any(store.count_open().values()):
            with self._changing:
                self._start()

    def submit(
        self,
        request: Request | str,
        *,
        n: int = 1,
        output_format: str | None = None,
        fps: float | None = None,
        **parameters: Any,
    ) -> BackgroundJob:
        """Accept a job; with a `state_dir` it is on the disk when this returns.

        Args:
            request: one prompt, or a `Request`.
            n: outputs, with seeds s, s+1, ...
            output_format: png, jpeg or webp for pictures; glb, obj or ply for meshes; wav, flac or
                mp3 for sound; default: the first of these. Videos are always MP4.
            fps: frames a second of videos; default: the model's own, or 16.
            parameters: as for `Engine.submit`; values must be JSON or PIL images.

        Raises:
            Rejected: the request is invalid; no job was accepted.
            Overloaded: too many jobs wait.
            StoreFailed: the disk cannot store it.
        """
        card = self._loop.loaded.card
        requests = checked(card, request, n, parameters)
        names, files = packed(requests[0].arguments)
        kind, work = work_and_kind(card, requests, self._settings, output_format, fps, names)
        description = {"model": card.id, "seeds": [request.seed for request in requests]}
        record = self._ask(self._runner.submit(kind, description, work, inputs=files))
        return self._shown(record)

    def get(self, job_id: str) -> BackgroundJob:
        """One job, with its current progress.

        Raises:
            JobNotFound: no job has this id, or it was deleted.
        """
        return self._shown(self._ask(self._runner.get(job_id)))

    def wait(self, job_id: str, timeout: float | None = None) -> BackgroundJob:
        """Wait for the end of a job; `state` has the result.

        Raises:
            JobNotFound: as for `get`.
            TimeoutError: `timeout` seconds have passed; the job continues.
            Draining: the engine was closed during the wait.
        """
        return self._shown(self._ask(self._ended(job_id, timeout)))

    def cancel(self, job_id: str) -> BackgroundJob:
        """Cancel a job before its next step. No effect on an ended job."""
        return self._shown(self._ask(self._runner.cancel(job_id)))

    def remove(self, job_id: str) -> None:
        """Delete a job and its files; a running job stops before its next step."""
        self._ask(self._runner.remove(job_id))

    def list(self, *, limit: int = 100) -> Sequence[BackgroundJob]:
        """The latest jobs, newest first."""
        return [self._shown(record) for record in self._ask(self._runner.page(limit=limit))[0]]

    def close(self) -> None:
        """Requeue running jobs for the next engine, and close the store."""
        with self._changing:
            if self._thread is not None and not self._is_closed:
                self._here.call_soon_threadsafe(self._end.set)
            self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def _shown(self, record: Record) -> BackgroundJob:
        paths = [self._store.file(record, name) for name in record.files]
        files = sorted(filter(None, paths), key=lambda path: (len(path.name), path.name))
        seeds = record.asked.get("seeds", [])
        return BackgroundJob(
            record.id, record.state, record.progress, seeds, record.error, files, record.warnings
        )

    async def _ended(self, job_id: str, within_s: float | None) -> Record:
        async with asyncio.timeout(within_s):
            return await self._runner.ended(job_id)

    def _ask(self, question: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Run a coroutine on the jobs' thread, and wait for it."""
        with self._changing:
            if self._is_closed:
                question.close()
                raise Draining("the engine was closed and takes no jobs")
            if self._thread is None:
                self._start()
            future = asyncio.run_coroutine_threadsafe(question, self._here)
        try:
            return future.result()
        except CancelledError:
            raise Draining("the engine was closed meanwhile") from None

    def _start(self) -> None:
        self._thread = Thread(None, asyncio.run, "carpool-jobs", [self._live()], daemon=True)
        self._thread.start()
        self._is_up.wait()

    async def _live(self) -> None:
        self._here, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._is_up.set()
        running = asyncio.create_task(self._runner.run())
        ending = asyncio.create_task(self._end.wait())
        await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            log.error("the runner of jobs failed", exc_info=running.exception())
        with self._changing:
            self._is_closed = True
        running.cancel()
        await self._runner.stop()
        await asyncio.sleep(0)  # pending calls become tasks, which the end of the loop cancels
