"""Jobs are run from the store to their one end, whatever their worker and the disk do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from carpool import errors
from carpool.jobs.clock import StoreClock
from carpool.jobs.database import Record
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.jobs.work import work_of
from carpool.types import CheckedRequest, OnProgress, Timings
from carpool.worker.protocol import Done, TokenUsage


class Hand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """Runs what it is given until the test says how that ends."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.away: dict[str | None, asyncio.Event] = {}  # until their workers are back
        self.running: dict[int, asyncio.Future[Done]] = {}  # by seed
        self.jobs: list[CheckedRequest] = []
        self.followers: dict[int, OnProgress] = {}
        self.given_up: list[int] = []

    async def wait_open(self, model: str | None = None) -> None:
        await self.is_open.wait()
        if model in self.away:
            await self.away[model].wait()

    async def submit(
        self, request: CheckedRequest, on_progress: OnProgress | None = None, on_preview: Any = None
    ) -> Done:
        assert on_progress is not None
        self.jobs.append(request)
        self.followers[request.seed] = on_progress
        self.running[request.seed] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[request.seed]
        except asyncio.CancelledError:
            self.given_up.append(request.seed)
            raise
        finally:
            del self.running[request.seed]

    def end(
        self, seed: int, error: errors.CarpoolError | None = None, *, warnings: Sequence[str] = ()
    ) -> None:
        if error is not None:
            self.running[seed].set_exception(error)
            return
        done = Done("", seed, [], Timings(), TokenUsage(0, 0), warnings=list(warnings))
        self.running[seed].set_result(done)


class Harness:
    """A store, a runner and a worker, and a disk that may be full."""

    def __init__(self, store: JobStore, **options: Any) -> None:
        self.store, self.worker, self.clock = store, Worker(), Hand()
        self.is_full = False
        self.runner = Runner(
            store, self.worker, {"video": self.write}, model=lambda: "mine",
            **{"max_running": 2, "again_s": 0.01, "clock": self.clock, **options},
        )  # fmt: skip

    def write(self, record: Record, done: Sequence[Done], folder: Path) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        (folder / "seeds").write_text(" ".join(str(one.seed) for one in done))

    async def submit(self, *seeds: int, **fields: Any) -> str:
        jobs = [CheckedRequest("old", seed, {"prompt": "a"}, **fields) for seed in seeds]
        return (await self.runner.submit("video", {}, work_of("mine", jobs))).id

    async def runs(self, *seeds: int) -> None:
        await until(lambda: sorted(self.worker.running) == sorted(seeds), f"{seeds} run")

    async def becomes(self, job_id: str, *states: str) -> Record:
        await until(lambda: self.store.get(job_id).state in states, f"{job_id} is {states}")
        return self.store.get(job_id)


async def until(is_so: Callable[[], bool], what: str) -> None:
    for _ in range(5000):
        if is_so():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"never: {what}")


@asynccontextmanager
async def living(store: JobStore | None = None, **options: Any) -> AsyncIterator[Harness]:
    """A runner that runs."""
    harness = Harness(store or JobStore(), **options)
    running = asyncio.create_task(harness.runner.run())
    try:
        yield harness
    finally:
        running.cancel()
        await harness.runner.stop()
        if store is None:
            harness.store.close()


async def test_a_job_has_the_warnings_of_its_requests_once() -> None:
    async with living() as harness:
        job = await harness.submit(1, 2)
        await harness.runs(1, 2)
        for seed in (1, 2):
            harness.worker.end(seed, warnings=["truncated"])

        assert (await harness.becomes(job, "completed")).warnings == ("truncated",)


async def test_a_job_is_run_and_its_files_are_kept() -> None:
    async with living() as harness:
        job_id = await harness.submit(7, 8, lora=(("a", 0.5),))
        await harness.runs(7, 8)
        assert harness.store.get(job_id).state == "in_progress"
        assert harness.worker.jobs[0].lora == (("a", 0.5),)
        harness.worker.end(8)
        harness.worker.end(7)

        done = await harness.becomes(job_id, "completed")

        path = harness.store.file(done, "seeds")
        assert path is not None
        assert path.read_text() == "7 8"


async def test_no_more_jobs_than_allowed_run_and_the_oldest_go_first() -> None:
    async with living() as harness:
        ids = [await harness.submit(seed) for seed in range(4)]
        await harness.runs(0, 1)
        harness.worker.end(1)
        await harness.runs(0, 2)
        assert [harness.store.get(job).state for job in ids] == [
            "in_progress", "completed", "in_progress", "queued",
        ]  # fmt: skip


async def test_progress_is_that_of_all_parts_and_never_falls() -> None:
    async with living() as harness:
        job_id = await harness.submit(1, 2)
        await harness.runs(1, 2)
        seen = []
        for part, step in [(1, 1), (2, 1), (1, 4), (2, 4)]:
            harness.worker.followers[part](step, 4)
            seen.append((await harness.runner.get(job_id)).progress)
        assert seen == [0, 25, 62, 99]

        harness.worker.end(1, errors.WorkerLost("died"))
        await until(lambda: len(harness.worker.jobs) == 4, "the job is run again")
        await harness.runs(1, 2)
        assert (await harness.runner.get(job_id)).progress == 99
        harness.worker.followers[1](1, 4)
        harness.worker.followers[2](0, 4)
        assert (await harness.runner.page())[0][0].progress == 99


async def test_progress_is_written_down_before_it_is_seen() -> None:
    async with living() as harness:
        job_id = await harness.submit(1)
        await harness.runs(1)
        harness.worker.followers[1](2, 10)
        assert harness.store.get(job_id).progress == 0
        assert (await harness.runner.get(job_id)).progress == 20
        assert harness.store.get(job_id).progress == 20


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_cancelled_job_is_given_up_and_stays_cancelled(is_running: bool) -> None:
    async with living() as harness:
        if not is_running:
            harness.worker.is_open.clear()
        job_id = await harness.submit(1)
        if is_running:
            await harness.runs(1)

        cancelled = await harness.runner.cancel(job_id)

        assert (cancelled.state, cancelled.error and cancelled.error["code"]) == (
            "cancelled", "client_closed",
        )  # fmt: skip
        harness.worker.is_open.set()
        other = await harness.submit(2)
        await harness.runs(2)
        harness.worker.end(2)
        await harness.becomes(other, "completed")
        assert harness.worker.given_up == [1] * is_running
        assert (await harness.runner.cancel(job_id)).state == "cancelled"
        assert (await harness.runner.cancel(other)).state == "completed"


@pytest.mark.parametrize("end", ["completed", "cancelled", "removed", "expired"])
async def test_who_waits_for_the_end_of_a_job_is_told_of_any_end(end: str) -> None:
    wall = Hand()
    store = JobStore(clock=StoreClock(wall, wall, wall), ttl_s=50)

    async with living(store) as harness:
        job_id = await harness.submit(1)
        await harness.runs(1)
        waiting = asyncio.create_task(harness.runner.ended(job_id))
        other = await harness.submit(2)
        await harness.runs(1, 2)
        harness.worker.end(2)
        await harness.becomes(other, "completed")
        assert not waiting.done()

        if end == "completed":
            harness.worker.end(1)
        elif end == "cancelled":
            await harness.runner.cancel(job_id)
        elif end == "removed":
            await harness.runner.remove(job_id)
        else:
            wall.now_s += 51
            harness.clock.now_s += 51
            await harness.submit(3)  # something happens

        if end == "removed":
            with pytest.raises(errors.JobNotFound):
                await waiting
        else:
            assert (await waiting).state == end
            assert (await harness.runner.ended(job_id)).state == end
        if end != "completed":
            await until(lambda: 1 in harness.worker.given_up, "it is given up")
    store.close()


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (errors.PipelineFailed("it broke"), "failed"),
        (errors.DeadlineExceeded("too late"), "expired"),
    ],
)
async def test_a_job_that_fails_says_why_and_its_other_parts_are_given_up(
    error: errors.CarpoolError, state: str
) -> None:
    async with living() as harness:
        job_id = await harness.submit(1, 2)
        await harness.runs(1, 2)

        harness.worker.end(1, error)

        ended = await harness.becomes(job_id, state)
        assert ended.error is not None
        assert (ended.error["code"], ended.error["message"]) == (error.code, error.message)
        assert harness.worker.given_up == [2]


async def test_a_job_that_no_worker_took_is_run_again_however_often() -> None:
    async with living() as harness:
        job_id = await harness.submit(1)
        for losses in range(5):
            await until(
                lambda n=losses: len(harness.worker.jobs) == n + 1,  # type: ignore[misc]
                "it is run again",
            )
            await harness.runs(1)
            harness.worker.end(1, errors.WorkerLost("the worker died"))

        await until(lambda: len(harness.worker.jobs) == 6, "it is run again")
        await harness.runs(1)
        harness.worker.end(1)
        await harness.becomes(job_id, "completed")
        assert len({job.request_id for job in harness.worker.jobs}) == 6


async def test_a_job_waits_for_its_model_while_others_of_the_server_go_on() -> None:
    async with living() as harness:
        harness.worker.away["mine"] = asyncio.Event()
        job_id = await harness.submit(1)
        await until(lambda: harness.store.get(job_id).state == "in_progress", "it is taken")
        await asyncio.sleep(0.05)
        assert harness.worker.jobs == []  # nobody was asked who cannot
        harness.worker.away["mine"].set()
        await harness.runs(1)
        harness.worker.end(1)
        await harness.becomes(job_id, "completed")


async def test_what_a_full_line_refuses_of_a_job_leaves_its_other_parts_alone() -> None:
    async with living() as harness:
        job_id = await harness.submit(1, 2, 3)
        await harness.runs(1, 2, 3)
        harness.worker.end(2, errors.Overloaded("full", retry_after_s=0.01))
        await until(lambda: len(harness.worker.jobs) == 4, "the refused part is run again")
        await harness.runs(1, 2, 3)
        for seed in (1, 2, 3):
            harness.worker.end(seed)
        await harness.becomes(job_id, "completed")
        assert [job.seed for job in harness.worker.jobs] == [1, 2, 3, 2]


async def test_a_full_disk_fails_the_job_and_no_other() -> None:
    async with living() as harness:
        first, second = await harness.submit(1), await harness.submit(2)
        await harness.runs(1, 2)
        harness.is_full = True
        harness.worker.end(1)
        failed = await harness.becomes(first, "failed")
        assert failed.error is not None
        assert failed.error["code"] == "store_failed"
        assert "No space left" in failed.error["message"]
        harness.is_full = False
        harness.worker.end(2)
        await harness.becomes(second, "completed")


async def test_the_time_that_a_job_waited_is_taken_off_its_timeout() -> None:
    wall = Hand()
    store = JobStore(clock=StoreClock(wall, wall, wall))

    async with living(store) as harness:
        harness.worker.is_open.clear()
        late = await harness.submit(1, timeout_s=5.0)
        wall.now_s += 4
        in_time = await harness.submit(2, timeout_s=5.0)
        wall.now_s += 2
        harness.worker.is_open.set()
        await harness.becomes(late, "expired")
        await harness.runs(2)
        assert harness.worker.jobs[0].timeout_s == 3.0
        harness.worker.end(2)
        await harness.becomes(in_time, "completed")
    store.close()


async def test_a_runner_that_is_stopped_just_as_something_happens_stops() -> None:
    with closing(JobStore()) as store:
        harness = Harness(store)
        running = asyncio.create_task(harness.runner.run())
        await until(lambda: bool(harness.runner._news._waiters), "it waits for news")
        harness.runner._news.set()
        running.cancel()
        await asyncio.wait([running], timeout=5)
        assert running.cancelled()
        await harness.runner.stop()


async def test_a_job_that_cannot_be_read_any_more_fails() -> None:
    async with living() as harness:
        job = await harness.runner.submit("video", {}, {"jobs": [{"seed": 1}]})
        failed = await harness.becomes(job.id, "failed")
        assert failed.error is not None
        assert "cannot be read any more" in failed.error["message"]


async def test_a_job_for_a_model_that_was_served_before_fails() -> None:
    async with living() as harness:
        work = work_of("other", [CheckedRequest("old", 1, {})])
        job = await harness.runner.submit("video", {}, work)
        failed = await harness.becomes(job.id, "failed")
        assert failed.error is not None
        assert failed.error["message"] == (
            "the job needs model 'other', and the server now runs 'mine'"
        )
