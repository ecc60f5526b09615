"""The front's side of a worker process: start it, talk to it, notice its death, start it again.

Requests in flight when the worker dies are run again by its successor, as `manifest.py` says; new
ones are refused until that has loaded the model. A worker that hangs is killed. All of it runs on
the front's event loop.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from carpool.config import EngineSettings, LogFormat, LogLevel
from carpool.errors import (
    CarpoolError,
    Draining,
    LoadFailed,
    Overloaded,
    PipelineFailed,
    Starting,
    WorkerLost,
    by_name,
)
from carpool.telemetry import tracing
from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.connection import Link
from carpool.worker.in_flight import Manifest
from carpool.worker.watchdog import EVERY_S, Vigil

log = logging.getLogger("carpool")

OnProgress = Callable[[int, int], None]
OnPreview = Callable[[protocol.Preview], None]
State = Literal["starting", "ready", "worker_lost", "draining", "stopped"]
_BACKOFF_S = (0.1, 0.5, 2.0, 8.0, 30.0)  # between the deaths of workers that never got ready


class Supervisor:
    """One worker process and its restarts.

    Args:
        passing: a folder for outputs that are too large for a frame.
        timeout_s: how long a worker may stand still; see `vigil.py`.
        log: how much the worker logs, how, and whether with prompts.
        otel: whether it sends traces.
    """

    def __init__(
        self,
        model: str,
        settings: EngineSettings,
        *,
        passing: Path | None = None,
        timeout_s: float = 60.0,
        log: tuple[LogLevel, LogFormat, bool] = ("info", "text", False),
        otel: bool = False,
    ) -> None:
        folder, self._passing = "" if passing is None else str(passing), passing
        self._load = protocol.Load(model, settings, folder, *log, otel)
        self._state: State = "starting"
        self._is_draining = False
        self._pending: dict[str, asyncio.Future[protocol.Done]] = {}
        self._manifest, self._timeout_s = Manifest(), timeout_s
        self._followers: dict[str, OnProgress] = {}
        self._viewers: dict[str, OnPreview] = {}
        self._asked: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()  # answered in order
        self._link: Link | None = None
        self._place_s: float | None = None  # when the worker is likely to have a place
        self.ready: protocol.Ready | None = None  # of the newest worker that got so far
        self._first_ready = asyncio.Event()
        self._is_open = asyncio.Event()  # ready, and not draining
        self._began_s = 0.0  # when the newest worker was started; event loop's clock
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        return "draining" if self._is_draining and self._state == "ready" else self._state

    def start(self) -> asyncio.Task[None]:
        """Begin to load. The task ends when `stop` is called, or fails with `LoadFailed`."""
        self._task = asyncio.create_task(self._keep_running())
        return self._task

    async def wait_ready(self) -> protocol.Ready:
        await self._first_ready.wait()
        assert self.ready is not None
        return self.ready

    async def wait_open(self) -> None:
        """Wait until requests would be accepted; for ever once it drains."""
        await self._is_open.wait()

    async def submit(
        self,
        job: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
    ) -> protocol.Done:
        """Run a job in the worker. Cancelling the awaiting task cancels the job.

        Args:
            on_progress: is told of denoising steps: those done, and how many there are; (0, 0)
                if they begin anew because the worker died.
            on_preview: is shown the job's `previews`; all come before the answer.

        Raises:
            Starting, WorkerLost, Draining: the worker takes nothing now.
            PipelineFailed: it ran in every worker that died, in the last one alone.
            CarpoolError: whatever became of the job.
        """
        self.check_open()
        future: asyncio.Future[protocol.Done] = asyncio.get_running_loop().create_future()
        self._pending[job.request_id] = future
        if on_progress is not None:
            self._followers[job.request_id] = on_progress
        if on_preview is not None:
            self._viewers[job.request_id] = on_preview
        try:
            self._manifest.add(protocol.Submit(job, on_progress is not None, tracing.carried()))
            self._send_due()
            return await future
        finally:
            self._pending.pop(job.request_id, None)
            if self._manifest.remove(job.request_id):  # not answered
                self._send(protocol.Cancel(job.request_id))
            self._send_due()
            self._followers.pop(job.request_id, None)
            self._viewers.pop(job.request_id, None)

    def check_open(self) -> None:
        """Raise unless a request would be accepted now."""
        if self._is_draining:
            raise Draining("the server is ending and takes no new requests", retry_after_s=5)
        if self._state == "starting":
            raise Starting("the model is still loading", retry_after_s=self._until_ready_s())
        if self._state != "ready":
            again_s = self._until_ready_s()
            raise WorkerLost("the worker has died and is being restarted", retry_after_s=again_s)

    def check_room(self) -> None:
        """Refuse work that the worker would refuse, without asking it: it has enough to do.

        Raises:
            Overloaded: as many wait for an answer as may be aboard and in line.
        """
        settings = self._load.settings
        if len(self._manifest) >= settings.max_running + settings.max_queue:
            raise Overloaded(
                f"the queue is full: {len(self._manifest)} requests wait or run, the most is "
                f"{settings.max_running} + {settings.max_queue} (--max-running, --max-queue)",
                retry_after_s=self._place_s or 1.0,
            )

    def _until_ready_s(self) -> float:
        """When the next worker is likely to be ready, by what the last one took."""
        took_s = 3.0 if self.ready is None else self.ready.load_s
        gone_s = asyncio.get_running_loop().time() - self._began_s
        return min(max(took_s - gone_s, 1.0), 120.0)

    async def statistics(self) -> dict[str, Any]:
        """The engine's own statistics."""
        answer: dict[str, Any] = await self._ask(protocol.AskStatistics())
        return answer

    async def lives(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        """What became of requests; without those that the worker does not know any more."""
        answer: list[dict[str, Any]] = await self._ask(protocol.AskLives(list(request_ids)))
        return answer

    async def _ask(self, question: protocol.AskStatistics | protocol.AskLives) -> Any:
        if self._state != "ready":
            self.check_open()
        future = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(future)
        self._send(question)
        return await future

    def reload(self) -> None:
        """Have the worker read its adapters' folder and batching config again."""
        self._send(protocol.Reload())

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for those in flight, then give up the rest."""
        self._is_draining = True
        self._is_open.clear()
        running = list(self._pending.values())
        if running:
            log.info("draining: %d requests still run", len(running))
            await asyncio.wait(running, timeout=timeout_s)
        self._give_up(Draining(f"the server ended {timeout_s:g} s after it was told to"))

    async def stop(self) -> None:
        """End the worker; returns when the process is gone."""
        self._is_draining = True
        self._is_open.clear()
        self._give_up(Draining("the server was told to end at once", retry_after_s=5))
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LoadFailed):
                await self._task
        self._state = "stopped"

    async def _keep_running(self) -> None:
        deaths = itertools.count()
        while True:
            was_ready = await self._run_once()
            if not self._first_ready.is_set():
                raise LoadFailed("the worker died while it loaded the model; see its messages")
            if was_ready:
                deaths = itertools.count()
            delay_s = _BACKOFF_S[min(next(deaths), len(_BACKOFF_S) - 1)]
            log.error("the worker died; a new one starts in %g s", delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> bool:
        """Run one worker process to its end. Says whether it ever got ready."""
        self._began_s = asyncio.get_running_loop().time()
        try:
            link = self._link = await Link.open(self._passing)
        except OSError as error:  # no memory or descriptors for it just now
            log.error("a worker cannot be started: %s", error)
            return False
        vigil = Vigil(self._timeout_s, asyncio.get_running_loop().time)
        watch: asyncio.Task[None] | None = None
        try:
            link.send(self._load)
            async for frame in link.heard():
                if isinstance(frame, protocol.CannotLoad) and self._first_ready.is_set():
                    # a file was broken meanwhile: it may be mended, and this server goes on then
                    log.error("a worker cannot be started: %s", frame.message)
                    break
                if isinstance(frame, protocol.Ready):
                    vigil.heard(protocol.Beat(0.0, 0.0))
                    watch = asyncio.create_task(self._watch(link, vigil))
                elif isinstance(frame, protocol.Beat):
                    vigil.heard(frame)
                    self._place_s = frame.place_s
                self._hear(frame)
        finally:
            if watch is not None:
                watch.cancel()
            if self._first_ready.is_set():
                self._state = "worker_lost"
                self._is_open.clear()
                self._bury()
            self._link = None
            await link.close()
        return watch is not None

    async def _watch(self, link: Link, vigil: Vigil) -> None:
        """Kill the worker if it hangs; its end is then seen as any other."""
        while True:
            await asyncio.sleep(EVERY_S)
            if vigil.look():
                break
        log.error("the worker has done nothing for %.0f s: it is killed", vigil.still_s)
        link.kill()

    def _bury(self) -> None:
        """The worker is dead: blame who is to blame, and tell the others that they begin anew."""
        for request_id in self._manifest.died():
            told = "this request ran in several workers that died, in the last one alone"
            self._answer(request_id, PipelineFailed(f"{told}; it is not tried again"))
        for request_id, future in self._pending.items():
            if not future.done() and (follower := self._followers.get(request_id)):
                follower(0, 0)
        self._give_up_questions(WorkerLost("the worker died", retry_after_s=self._until_ready_s()))

    def _hear(self, frame: protocol.ToFront) -> None:
        match frame:
            case protocol.Ready() as ready:
                self.ready, self._state = ready, "ready"
                self._first_ready.set()
                if not self._is_draining:
                    self._is_open.set()
                self._send_due()
            case protocol.Started(request_id):
                self._manifest.started(request_id)
            case protocol.Reloaded(card, problems):
                assert self.ready is not None
                self.ready = protocol.Ready(card, self.ready.versions, self.ready.load_s)
                log.info("reloaded; adapters: %s", ", ".join(card.lora) or "none")
                for problem in problems:
                    log.error("not reloaded: %s", problem)
            case protocol.CannotLoad(message):
                raise LoadFailed(message)
            case protocol.Progress(request_id, step, steps):
                if follower := self._followers.get(request_id):
                    follower(step, steps)
            case protocol.Preview() as preview:
                if viewer := self._viewers.get(preview.request_id):
                    viewer(preview)
            case protocol.Done() as done:
                self._answer(done.request_id, done)
            case protocol.Failed() as failed:
                error = by_name(failed.error)(
                    failed.message, param=failed.param, retry_after_s=failed.retry_after_s
                )
                self._answer(failed.request_id, error)
            case protocol.Statistics(told) | protocol.Lives(told):
                asked = self._asked.get_nowait()
                if not asked.done():  # whoever asked may have left
                    asked.set_result(told)

    def _answer(self, request_id: str, answer: protocol.Done | CarpoolError) -> None:
        self._manifest.remove(request_id)
        future = self._pending.get(request_id)
        if future is None or future.done():  # nobody waits any more
            return
        if isinstance(answer, CarpoolError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _give_up(self, error: CarpoolError) -> None:
        for request_id in list(self._pending):
            self._answer(request_id, error)
        self._give_up_questions(error)

    def _give_up_questions(self, error: CarpoolError) -> None:
        while not self._asked.empty():
            asked = self._asked.get_nowait()
            if not asked.done():
                asked.set_exception(error)

    def _send_due(self) -> None:
        """Send what the worker may have now, if there is one."""
        if self._state == "ready":
            for submit in self._manifest.due():
                self._send(submit)

    def _send(self, frame: protocol.ToWorker) -> None:
        if self._link is not None:
            self._link.send(frame)
