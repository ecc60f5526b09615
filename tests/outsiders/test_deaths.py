"""A request fails for the deaths of its workers only where there is evidence against it."""

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from carpool.config import EngineSettings
from carpool.errors import PipelineFailed, WorkerLost
from carpool.fleet.pool import Pool
from carpool.types import CheckedRequest, JournalEntry, Timings
from carpool.worker import protocol
from carpool.worker.guilt import MOST_LIVES, DeathLog
from carpool.worker.journals import Journals
from carpool.worker.supervisor import Supervisor, WorkerListener
from support.app import CARD
from support.endpoints import ENDPOINT
from support.pictures import ALIKE, gap, picture
from support.server_process import PATIENCE_S, Server, body, eventually, serving


@dataclass
class Life:
    """What a worker does with its request, and how it dies."""

    answers: int = 0  # new ones, where a journal is kept
    step: int = 0  # that it tells
    unkept: int = 0  # number of the last call whose answer no journal holds
    dies_early: bool = False  # before its journal is replayed
    is_explained: bool = False
    says_lost: bool = False  # instead of dying at once
    ends: bool = False  # it does not die, and answers


class FakeProcess:
    """A worker without a process: acts on the first request that it gets."""

    end, is_lost = "it is none", False

    def __init__(self, life: Life) -> None:
        self._life, self.is_explained = life, life.is_explained
        self._submitted: asyncio.Queue[protocol.Submit | None] = asyncio.Queue()

    def send(self, message: protocol.ToWorker) -> None:
        if isinstance(message, protocol.Submit):
            self._submitted.put_nowait(message)

    def kill(self) -> None:
        self._submitted.put_nowait(None)

    async def messages(self) -> AsyncIterator[protocol.ToFront]:
        yield protocol.WorkerReady(CARD, {}, 0.0)
        life = self._life
        while (submit := await self._submitted.get()) is not None:
            name, first = submit.request.request_id, len(submit.journal) + 1
            yield protocol.Started(name)
            if life.dies_early:
                return
            if submit.journal:
                yield protocol.Answers([], {name: submit.journal[-1].number})
            if life.step:
                yield protocol.Progress(name, life.step, 1000)
            numbers = range(first, first + life.answers)
            entries = [(name, JournalEntry(number, b"mark", b"")) for number in numbers]
            yield protocol.Answers(entries, {name: life.unkept} if life.unkept else {})
            if life.says_lost:
                yield protocol.RequestFailed(name, WorkerLost.__name__, "the device is lost")
            elif life.ends:
                yield protocol.Done(name, 1, [], Timings(), protocol.TokenUsage(1, 1))
            else:
                return

    async def close(self) -> None:
        pass


class FakeConnector:
    """Workers that live one life each; the last one answers."""

    is_remote = False

    def __init__(self, lives: Sequence[Life]) -> None:
        self._lives, self.opened = [*lives, Life(ends=True)], 0

    async def open(self) -> FakeProcess:
        self.opened += 1
        return FakeProcess(self._lives[self.opened - 1])

    async def end(self) -> None:
        pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.worker.restarts.BACKOFF_S", (0.0,))


def run(
    *workers: Sequence[Life], has_journal: bool = True
) -> tuple[list[protocol.Done | BaseException], list[int]]:
    """Run a request on each of some workers, side by side.

    Returns:
        The answers, and how often each worker was started.
    """
    deaths, journals = DeathLog(), Journals() if has_journal else None
    connectors = [FakeConnector(lives) for lives in workers]

    async def story() -> list[protocol.Done | BaseException]:
        def pool_of(connector: FakeConnector) -> Pool:
            def worker(device: str, listener: WorkerListener) -> Supervisor:
                load = protocol.LoadModel("", EngineSettings())
                return Supervisor(
                    load, connector, listener=listener, journals=journals, deaths=deaths
                )

            return Pool(worker, ["cpu"], EngineSettings(), journals)

        pools = [pool_of(connector) for connector in connectors]
        for pool in pools:
            pool.start()
        await asyncio.gather(*(pool.wait_ready() for pool in pools))
        requests = [CheckedRequest(f"{n}", 1, {}) for n in range(len(workers))]
        pairs = zip(pools, requests, strict=True)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(
                *(pool.submit(request) for pool, request in pairs), return_exceptions=True
            )
        await asyncio.gather(*(pool.stop() for pool in pools))
        return answers

    return asyncio.run(story()), [connector.opened for connector in connectors]


EXPLAINED, FURTHER, STUCK = Life(is_explained=True), Life(answers=1), Life()
QUICK = [Life(answers=7, step=7), *[Life(dies_early=True)] * (MOST_LIVES - 2)]
ANSWERED: dict[str, tuple[Sequence[Life], bool]] = {  # and whether it has a journal
    "gets further": ([FURTHER] * (MOST_LIVES - 1), True),
    "gets further, the device is lost": (
        [Life(answers=1, says_lost=True)] * (MOST_LIVES - 1),
        True,
    ),
    "others are guilty": ([EXPLAINED] * (MOST_LIVES - 1), True),
    "others are guilty, no journal": ([EXPLAINED] * (MOST_LIVES - 1), False),
    "others lose the device": ([Life(is_explained=True, says_lost=True)] * (MOST_LIVES - 1), True),
    "dies before it is where it was": (QUICK, True),
    "dies before it is where it was, no journal": (QUICK, False),
    "answers too large for a journal": ([Life(unkept=n) for n in range(1, 30)], True),
    "steps without a journal": ([Life(step=n) for n in range(1, 30)], False),
    "other steps": ([Life(step=n) for n in (300, 200, 250, 120, 299, 10)], False),
    "a last chance without its journal": (
        [Life(answers=7), STUCK, Life(answers=3), Life(answers=3), Life(answers=2)],
        True,
    ),
}


@pytest.mark.parametrize("story", ANSWERED)
def test_a_request_without_evidence_against_it_is_answered(story: str) -> None:
    lives, has_journal = ANSWERED[story]
    [answer], [opened] = run(lives, has_journal=has_journal)

    assert isinstance(answer, protocol.Done)
    assert opened == len(lives) + 1


GUILTY: dict[str, tuple[Sequence[Life], bool, int]] = {  # and the workers that it is tried on
    "at the start": ([STUCK] * 100, False, 4),
    "at one step": ([Life(step=7)] * 100, False, 4),
    "the device is lost": ([Life(says_lost=True)] * 100, False, 4),
    "also without its journal": ([Life(answers=7), STUCK, Life(answers=7), *[STUCK] * 9], True, 4),
    "no worker brings it forward": ([EXPLAINED] * 100, True, MOST_LIVES + 1),
}


@pytest.mark.parametrize("story", GUILTY)
def test_a_request_that_kills_at_one_point_or_never_advances_fails(story: str) -> None:
    lives, has_journal, tried = GUILTY[story]
    [answer], [opened] = run(lives, has_journal=has_journal)

    assert isinstance(answer, PipelineFailed)
    says = f"{MOST_LIVES} workers that died, without any progress"
    says = "several workers that died at the same point" if tried == 4 else says
    assert says in str(answer)
    assert opened == tried


def test_requests_of_several_workers_that_die_at_once_are_answered() -> None:
    answers, _ = run([Life()] * 8, [Life()] * 8, [Life()] * 8)
    assert all(isinstance(answer, protocol.Done) for answer in answers)


# Real processes


def named(server: Server, name: str) -> list[int]:
    """The server's processes of a name."""
    return [
        pid for pid in server.processes() if Path(f"/proc/{pid}/comm").read_text().strip() == name
    ]


def job_of(server: Server, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = server.get(f"/v1/jobs/{job_id}").json()
    return job


def killed_again_and_again(server: Server, name: str, kills: int, **asked: Any) -> Image.Image:
    """The picture of a job that goes on under kills of these processes."""
    with server.client() as client:
        sent = body(**asked, background_job=True)
        job_id = client.post(ENDPOINT, json=sent).raise_for_status().json()["id"]
    progress = 0
    for _ in range(kills):
        eventually(
            lambda least=progress + 2: job_of(server, job_id)["progress"] >= least,  # type: ignore[misc]
            PATIENCE_S,
            "the job advances",
        )
        progress = job_of(server, job_id)["progress"]
        for pid in named(server, name):
            os.kill(pid, signal.SIGKILL)
    return picture_of(server, job_id)


def picture_of(server: Server, job_id: str) -> Image.Image:
    """The picture of a job, once it has ended."""
    eventually(lambda: job_of(server, job_id)["status"] != "in_progress", PATIENCE_S, "it ends")
    job = job_of(server, job_id)
    assert (job["status"], job["error"]) == ("completed", None)
    return picture(server.get(job["files"][0]["url"]).content)


def drawn_in_peace(server: Server, **asked: Any) -> Image.Image:
    eventually(lambda: server.health() == 200, PATIENCE_S, "a worker is ready")
    answer = server.draw(**asked).raise_for_status().json()
    return picture(base64.b64decode(answer["data"][0]["b64_json"]))


@pytest.mark.timeout(300)
def test_a_job_survives_six_kills_of_which_none_lets_it_make_another_step() -> None:
    asked: dict[str, Any] = {"num_inference_steps": 120, "seed": 6}
    with serving() as server:
        with server.client() as client:
            sent = body(**asked, background_job=True)
            job_id = client.post(ENDPOINT, json=sent).raise_for_status().json()["id"]
        far = "half of its steps are made"
        eventually(lambda: job_of(server, job_id)["progress"] >= 50, PATIENCE_S, far)
        for _ in range(6):
            [worker] = named(server, "carpool-worker")
            os.kill(worker, signal.SIGKILL)
            begun = server.stderr.count("is ready again")
            again = partial(_has_more, server, "is ready again", begun)
            eventually(again, PATIENCE_S, "the next worker is there")

        assert gap(picture_of(server, job_id), drawn_in_peace(server, **asked)) <= ALIKE
        assert job_of(server, job_id)["progress"] == 100
        assert server.stderr.count("the worker died") == 6


def _has_more(server: Server, text: str, than: int) -> bool:
    return server.stderr.count(text) > than


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "journal"), [("carpool-worker", "jobs"), ("carpool-fork", "memory")]
)
def test_jobs_survive_deaths_of_a_fork_server_of_their_own_and_of_all_workers_at_once(
    name: str, journal: str
) -> None:
    flags = ("--workers", "2", "--journal", journal)
    with serving(*flags, forkserver="") as server, ThreadPoolExecutor(2) as pool:
        asked: list[dict[str, Any]] = [
            {"num_inference_steps": 400, "seed": seed} for seed in (1, 2)
        ]
        jobs = [pool.submit(killed_again_and_again, server, name, 5, **one) for one in asked]
        for job, one in zip(jobs, asked, strict=True):
            drawn = job.result()
            assert gap(drawn, drawn_in_peace(server, **one)) <= ALIKE
