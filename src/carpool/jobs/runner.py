"""Run the jobs of a store: take queued ones, follow their progress, store their results.

A job is queued again if its worker died or the server stops before its end. The runner's tasks run
on the event loop; the store and the encoders run on threads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from carpool.errors import (
    Cancelled,
    CarpoolError,
    DeadlineExceeded,
    Draining,
    Overloaded,
    PipelineFailed,
    Starting,
    StoreFailed,
    WorkerLost,
    in_full,
    named,
)
from carpool.jobs.database import End, JobState, Record
from carpool.jobs.interfaces import EngineClient, JobListener, JobOutput, Writer
from carpool.jobs.journal_files import JobJournals
from carpool.jobs.store import JobStore
from carpool.jobs.work import Reader, requests_of
from carpool.types import CheckedRequest, Clock

log = logging.getLogger("carpool")

_TIDY_S = 30.0  # interval of checks for jobs that are too old
_STOP_S = 10.0  # timeout of unfinished file writes at the server's end


class Runner:
    """Keeps a bounded number of jobs running until it is stopped."""

    def __init__(
        self,
        store: JobStore,
        client: EngineClient,
        writers: Mapping[str, Writer],
        *,
        model: Callable[[], str | Collection[str]],
        max_running: int,
        read: Reader | None = None,
        journals: JobJournals | None = None,
        again_s: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make a runner; `run` starts it.

        Args:
            store: the job store; the caller closes it after `stop`.
            writers: file writers by kind of job.
            model: returns the name or names of the served models, after the workers are open.
            max_running: concurrent jobs in the worker.
            read: decodes input pictures; None: jobs have no pictures.
            journals: the jobs' journals on the disk, to continue jobs of an earlier run.
            again_s: retry interval after a disk error or a full queue.
            clock: times the checks for old jobs.
        """
        self.store = store
        self._client, self._writers, self._model = client, writers, model
        self._max_running, self._again_s, self._clock = max_running, again_s, clock
        self._read, self._journals = read, journals
        self._tidy_s = min(_TIDY_S, store.ttl_s / 2)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._at_work: dict[str, asyncio.Task[list[JobOutput]]] = {}  # cancellable runs
        self._percents: dict[str, int] = {}
        self._listeners: list[JobListener] = []
        self._changing = asyncio.Lock()  # a job is never taken during its cancellation
        self._news = asyncio.Event()
        self._ended = asyncio.Event()  # set when any job ends
        self._tidied_s = clock()
        self._finisher = ThreadPoolExecutor(2, "carpool-files")

    def listen(self, listener: JobListener) -> None:
        """Add a listener of job events."""
        self._listeners.append(listener)

    # For clients. A missing job, or a job of another owner, raises `JobNotFound`

    async def submit(self, *args: Any, **options: Any) -> Record:
        """Accept a job; see `JobStore.submit`."""
        accepted = await asyncio.to_thread(self.store.submit, *args, **options)
        self._news.set()
        return accepted

    async def cancel(self, job_id: str, owner: str = "") -> Record:
        """Cancel a job before its next step. An ended job does not change."""
        async with self._changing:
            record = await asyncio.to_thread(self.store.get, job_id, owner)
            end = partial(self.store.end, job_id, "cancelled", Cancelled("the job was cancelled"))
            if await asyncio.to_thread(end, progress=self._percents.get(job_id, 0)):
                self._notify(record, "cancelled")
            self._stop_work(job_id)
        return await self.get(job_id, owner)

    async def remove(self, job_id: str, owner: str = "") -> None:
        """Delete a job and its files; a running job stops before its next step."""
        async with self._changing:
            record = await asyncio.to_thread(self.store.get, job_id, owner)
            await asyncio.to_thread(self.store.remove, job_id, owner)
            if record.is_open:
                self._notify(record, "cancelled")
            self._stop_work(job_id)

    async def get(self, job_id: str, owner: str = "") -> Record:
        """One job, with its current progress."""
        percents = self._percents.copy()
        record = await asyncio.to_thread(self.store.get, job_id, owner)
        return (await self._with_progress([record], percents))[0]

    async def ended(self, job_id: str, owner: str = "") -> Record:
        """Wait for the end of a job in any state."""
        while True:
            next_end = self._ended
            record = await self.get(job_id, owner)
            if not record.is_open:
                return record
            await next_end.wait()

    async def count_open(self, owner: str | None = None) -> dict[JobState, int]:
        """See `JobStore.count_open`."""
        return await asyncio.to_thread(self.store.count_open, owner)

    async def page(self, owner: str = "", **options: Any) -> tuple[list[Record], bool]:
        """A page of the owner's jobs, with their current progress: see `JobStore.page`."""
        percents = self._percents.copy()
        records, has_more = await asyncio.to_thread(self.store.page, owner, **options)
        return await self._with_progress(records, percents), has_more

    async def _with_progress(
        self, records: Sequence[Record], percents: Mapping[str, int]
    ) -> list[Record]:
        """Add progress to records, as measured before they were read. It is stored before clients
        see it, so it never falls, even after a kill."""
        ahead = {
            row.id: percents[row.id] for row in records if percents.get(row.id, 0) > row.progress
        }
        if ahead:
            try:
                await asyncio.to_thread(self.store.note_progress, ahead)
            except StoreFailed as error:
                log.error("progress cannot be stored or shown: %s", in_full(error))
                ahead = {}
        return [replace(row, progress=ahead.get(row.id, row.progress)) for row in records]

    # Running jobs

    async def run(self) -> None:
        """Run queued jobs until cancelled."""
        while True:
            await self._client.wait_open()
            try:
                records = await self._take()
                await self._tidy()
            except StoreFailed as error:
                log.error("no job can be started: %s", in_full(error))
                await asyncio.sleep(self._again_s)
                continue
            if not records:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._tidy_s):  # `wait_for` may miss a cancellation
                        await self._news.wait()
                self._news.clear()

    async def stop(self) -> None:
        """Stop: store complete results, and leave running jobs to the next start."""
        for work in self._at_work.values():
            work.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=_STOP_S)
            for task in late:
                task.cancel()
        self._finisher.shutdown(wait=False, cancel_futures=True)
        if self._journals is not None:
            self._journals.stop()

    async def _take(self) -> int:
        async with self._changing:
            free = self._max_running - len(self._tasks)
            records = await asyncio.to_thread(self.store.take, free) if free > 0 else []
            for record in records:
                work = asyncio.create_task(self._work(record))
                self._at_work[record.id] = work
                self._tasks[record.id] = asyncio.create_task(self._follow(record, work))
        return len(records)

    async def _tidy(self) -> None:
        if self._clock() - self._tidied_s >= self._tidy_s:
            self._tidied_s = self._clock()
            for record in await asyncio.to_thread(self.store.tidy):
                self._notify(record, "expired")
                self._stop_work(record.id)

    async def _work(self, record: Record) -> list[JobOutput]:
        """Run all requests of a job concurrently. The first failure cancels the rest."""
        await self._client.wait_open()
        stored = partial(self.store.input, record.id)
        requests = await asyncio.to_thread(
            requests_of, record, self._model(), stored, self._read, self.store.clock.uptime_s()
        )
        for listener in self._listeners:
            listener.runs(record, requests)
        steps = [(0, 0)] * len(requests)

        def progressed(part: int, step: int, of: int) -> None:
            steps[part] = step, of
            if all(of for _, of in steps):
                steps_done, steps_total = (sum(numbers) for numbers in zip(*steps, strict=True))
                percent = min(99, 100 * steps_done // steps_total)
                self._percents[record.id] = max(percent, self._percents.get(record.id, 0))
                for listener in self._listeners:
                    listener.progressed(record, steps_done, steps_total)

        def previewed(part: int, preview: Any) -> None:
            for listener in self._listeners:
                listener.previewed(record, part, preview)

        async def run(part: int, request: CheckedRequest) -> JobOutput:
            """Run one request, when the worker's queue has room."""
            while True:
                if self._journals is not None:
                    await self._journals.resume(record.id, part, request.request_id)
                try:
                    await self._client.wait_open(request.model)  # waits for its own model only
                    follow = partial(progressed, part), partial(previewed, part)
                    return await self._client.submit(request, *follow)
                except Overloaded as error:
                    await asyncio.sleep(max(error.retry_after_s or 0.0, self._again_s))
                finally:
                    if self._journals is not None:
                        self._journals.leave(request.request_id)

        try:
            async with asyncio.TaskGroup() as group:
                parts = [group.create_task(run(*part)) for part in enumerate(requests)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [part.result() for part in parts]

    async def _follow(self, record: Record, work: "asyncio.Task[list[JobOutput]]") -> None:
        """Store the result of one run: the job ends, or is queued again."""
        try:
            await asyncio.wait([work])
            del self._at_work[record.id]
            if work.cancelled():
                await self._with_retries(self.store.requeue, record)  # no effect on an ended job
            else:
                await self._complete(record, work.result())
        except (Starting, WorkerLost, Draining):  # no worker took it, so the job is not at fault
            await self._with_retries(self.store.requeue, record)
        except DeadlineExceeded as error:
            await self._end(record, "expired", error)
        except CarpoolError as error:
            if error.__cause__ is not None:
                log.error("job %s failed: %s", record.id, in_full(error))
            await self._end(record, "failed", error)
        except Exception as error:
            log.exception("job %s failed unexpectedly", record.id)
            await self._end(record, "failed", PipelineFailed(f"the job failed: {named(error)}"))
        finally:
            self._percents.pop(record.id, None)
            del self._tasks[record.id]
            self._news.set()

    async def _complete(self, record: Record, outputs: Sequence[JobOutput]) -> None:
        write = partial(self._writers[record.kind], record, outputs)
        skipped = [output.skipped_steps for output in outputs]
        complete = partial(
            self.store.complete, record.id, write, keep=record.work.get("keep", ()),
            warnings=list(dict.fromkeys(text for output in outputs for text in output.warnings)),
            skipped_steps=skipped if any(skipped) else (), settings=outputs[0].settings,
            timings=asdict(max((o.timings for o in outputs), key=lambda times: times.total_s)),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._finisher, complete):
            self._notify(record, "completed", outputs)

    async def _end(self, record: Record, state: End, error: CarpoolError) -> None:
        if await self._with_retries(self.store.end, record, state, error):
            self._notify(record, state)

    async def _with_retries(
        self, change: Callable[..., Any], record: Record, *args: Any, **options: Any
    ) -> Any:
        """Change a job in the store; retry after disk errors."""
        percent = self._percents.get(record.id, 0)
        while True:
            try:
                return await asyncio.to_thread(
                    change, record.id, *args, progress=percent, **options
                )
            except StoreFailed as error:
                log.error("the end of a job cannot be written yet: %s", in_full(error))
                await asyncio.sleep(self._again_s)

    def _notify(
        self, record: Record, state: End | Literal["completed"], outputs: Sequence[JobOutput] = ()
    ) -> None:
        self._ended.set()
        self._ended = asyncio.Event()
        took_s = self.store.clock.uptime_s() - record.created_up_s
        for listener in self._listeners:
            listener.ended(record, state, took_s, outputs)

    def _stop_work(self, job_id: str) -> None:
        if work := self._at_work.get(job_id):
            work.cancel()
