"""The front's side of a worker, without one."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from carpool.config import EngineSettings
from carpool.errors import LoadFailed, Overloaded, WorkerLost
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from carpool.worker.connection import LocalConnector, describe_end
from carpool.worker.guilt import Deadlock, Death
from carpool.worker.protocol import WorkerReady
from carpool.worker.restarts import BACKOFF_S, FIRST_TRIES, Restarts
from carpool.worker.supervisor import Supervisor, WorkerListener
from support.app import CARD
from support.fake_hosts import until

LOAD = protocol.LoadModel("none", EngineSettings())


class Silent(Supervisor):
    """Its worker takes everything and answers nothing."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(protocol.LoadModel("none", settings), LocalConnector())
        self.sent: list[protocol.ToWorker] = []
        self._receive(WorkerReady(CARD, {}, 0.0))

    def _send(self, message: protocol.ToWorker) -> None:
        self.sent.append(message)


async def test_who_is_given_up_is_cancelled_in_the_worker_once_and_who_is_answered_is_not() -> None:
    supervisor = Silent(EngineSettings())
    given_up, answered = (
        asyncio.create_task(supervisor.submit(CheckedRequest(name, 1, {})))
        for name in ("one", "two")
    )
    await asyncio.sleep(0)
    given_up.cancel()
    supervisor._requests.answer("two", Overloaded("no"))
    await asyncio.wait([given_up, answered])
    sent = supervisor.sent

    assert [frame for frame in sent if isinstance(frame, protocol.Cancel)] == [
        protocol.Cancel("one")
    ]


async def test_a_request_leaves_a_later_one_of_its_id_in_flight() -> None:
    supervisor = Silent(EngineSettings())
    first = asyncio.create_task(supervisor.submit(CheckedRequest("one", 1, {})))
    await asyncio.sleep(0)
    supervisor._requests.answer("one", Overloaded("no"))  # `first` has not seen it yet
    second = asyncio.create_task(supervisor.submit(CheckedRequest("one", 2, {})))
    await asyncio.wait([first])

    done = protocol.Done("one", 2, [], Timings(), protocol.TokenUsage(0, 0))
    supervisor._receive(done)

    async with asyncio.timeout(10):
        assert await second == done
    assert not [one for one in supervisor.sent if isinstance(one, protocol.Cancel)]


class Scripted:
    """Workers that are none: each says what it is told to and dies, the last one lives on.

    One that is told nothing is killed as it loads.
    """

    end, is_lost, is_explained = "it is none", False, False

    def __init__(self, *told: protocol.ToFront | None) -> None:
        self._told, self.opened = list(told), 0

    async def open(self, spool: object = None, start: object = None) -> "Scripted":
        self.opened += 1
        return self

    def send(self, message: protocol.ToWorker) -> None:
        pass

    async def messages(self) -> AsyncIterator[protocol.ToFront]:
        told = self._told.pop(0)
        if told is None:
            return
        yield told
        if not self._told or isinstance(self._told[0], protocol.LoadFailure):
            await asyncio.sleep(0.01 if self._told else 1000)

    async def close(self) -> None:
        pass


def supervised(
    monkeypatch: pytest.MonkeyPatch, *told: protocol.ToFront | None
) -> tuple[Supervisor, Scripted]:
    workers = Scripted(*told)
    return supervisor_of(monkeypatch, workers), workers


def supervisor_of(monkeypatch: pytest.MonkeyPatch, workers: Scripted, **options: Any) -> Supervisor:
    """One whose connections are these workers, which start again at once."""
    monkeypatch.setattr("carpool.worker.connection.WorkerConnection", workers)
    monkeypatch.setattr("carpool.worker.restarts.BACKOFF_S", (0.0,))
    return Supervisor(LOAD, LocalConnector(), **options)


READY, BROKEN = WorkerReady(CARD, {}, 0.0), protocol.LoadFailure("rules.json cannot be read")


@pytest.mark.parametrize("wants_memory", [True, False])
async def test_a_model_that_cannot_be_loaded_says_whether_it_is_for_want_of_memory(
    monkeypatch: pytest.MonkeyPatch, *, wants_memory: bool
) -> None:
    failure = protocol.LoadFailure("it does not fit", wants_memory)
    supervisor, _ = supervised(monkeypatch, failure)
    with pytest.raises(LoadFailed, match="it does not fit") as told:
        await supervisor.start()
    assert told.value.wants_memory is wants_memory


async def test_a_file_that_was_broken_meanwhile_keeps_no_server_from_starting_its_next_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, workers = supervised(monkeypatch, READY, BROKEN, BROKEN, READY)
    running = supervisor.start()
    async with asyncio.timeout(10):
        while workers.opened < 4 or supervisor.state != "ready":
            await asyncio.sleep(0)
            assert not running.done()
    await supervisor.stop()

    assert caplog.text.count("a worker cannot be started: rules.json cannot be read") == 2


async def test_the_successor_of_a_worker_has_its_adapters_before_it_takes_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that it can still read; the card that requests are checked against says which."""

    class Registering(Scripted):
        """Each worker answers additions when it is told to; the first one dies when told to."""

        is_dead, may_answer = asyncio.Event(), asyncio.Event()

        def __init__(self) -> None:
            super().__init__()
            self.added = asyncio.Queue[protocol.Ask]()

        def send(self, message: protocol.ToWorker) -> None:
            if isinstance(message, protocol.Ask):
                self.added.put_nowait(message)

        async def messages(self) -> AsyncIterator[protocol.ToFront]:
            yield READY
            for _ in range(3 if self.opened == 1 else 2):
                asked = await self.added.get()
                await self.may_answer.wait()
                assert isinstance(asked.query, protocol.AddLora)
                name = asked.query.name
                bad = name == "broken" or (self.opened > 1 and name == "removed")
                names = ["ink"] if name == "ink" or self.opened > 1 else ["ink", "removed"]
                card = dataclasses.replace(CARD, lora=tuple(names))
                problems = ["it cannot be read"] if bad else []
                yield protocol.Reloaded(card, problems)
                yield protocol.Answer(asked.number, problems)
            await self.is_dead.wait()
            self.is_dead.clear()

    workers, listener = Registering(), WorkerListener()

    supervisor = supervisor_of(monkeypatch, workers, listener=listener)
    supervisor.start()
    await supervisor.wait_ready()
    workers.may_answer.set()
    assert await supervisor.add_lora("ink", "ink.safetensors") == []
    assert await supervisor.add_lora("removed", "gone.safetensors") == []
    assert await supervisor.add_lora("broken", "broken.safetensors") == ["it cannot be read"]
    listener.adapters = {"ink": "ink.safetensors", "removed": "gone.safetensors"}
    workers.may_answer.clear()
    workers.is_dead.set()
    await until(lambda: workers.opened == 2 and workers.added.qsize() > 0)
    assert supervisor.state == "worker_lost"
    workers.may_answer.set()
    await until(lambda: supervisor.takes_requests)
    assert supervisor.ready is not None
    assert supervisor.ready.card.lora == ("ink",)
    workers.is_dead.set()
    await supervisor.stop()
    assert "not reloaded: it cannot be read" in caplog.text


def test_clients_of_a_lost_worker_are_told_the_time_that_a_start_takes_with_its_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> float | None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        monkeypatch.setattr(loop, "time", lambda: passed_s)
        supervisor, workers = supervised(monkeypatch, READY, READY)  # `READY` says 0 s: its load
        begin, is_restarting = workers.open, asyncio.Event()

        async def open_slowly(spool: object = None, start: object = None) -> Scripted:
            nonlocal passed_s
            if workers.opened:
                passed_s += 5.0
                is_restarting.set()
                await asyncio.Event().wait()
            passed_s += 20.0
            return await begin()

        monkeypatch.setattr(workers, "open", open_slowly)
        supervisor.start()
        await is_restarting.wait()
        with pytest.raises(WorkerLost) as told:
            supervisor.check_open()
        await supervisor.stop()
        return told.value.retry_after_s

    assert asyncio.run(story()) == 15.0


def test_a_worker_that_died_takes_no_requests_from_then_on_however_long_its_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changes(WorkerListener):
        worker: Supervisor

        def __init__(self) -> None:
            self.takes_requests = list[bool]()

        def changed(self) -> None:
            self.takes_requests.append(self.worker.takes_requests)

    async def story() -> None:
        _, workers = supervised(monkeypatch, READY, READY)
        is_closing = asyncio.Event()

        async def close() -> None:
            is_closing.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(workers, "close", close)
        listener.worker = supervisor = Supervisor(LOAD, LocalConnector(), listener=listener)
        supervisor.start()
        async with asyncio.timeout(10):
            await is_closing.wait()
        assert listener.takes_requests == [True, False]
        await supervisor.stop()

    listener = Changes()
    asyncio.run(story())


@pytest.mark.parametrize("kills", range(FIRST_TRIES))
async def test_a_worker_that_is_killed_in_its_first_load_is_started_again(
    monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    supervisor, workers = supervised(monkeypatch, *[None] * kills, READY)
    running = supervisor.start()
    async with asyncio.timeout(10):
        assert await supervisor.wait_ready() == READY
    assert workers.opened == kills + 1
    assert not running.done()
    await supervisor.stop()


async def test_a_model_whose_workers_all_die_as_they_load_is_given_up_after_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor, workers = supervised(monkeypatch, *[None] * 100)
    with pytest.raises(LoadFailed, match=r"4 workers died while they loaded .*\(it is none\)"):
        await supervisor.start()
    assert workers.opened == FIRST_TRIES


async def test_a_worker_that_hangs_as_it_loads_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(Scripted):
        """The first one says nothing, until it is killed."""

        async def messages(self) -> AsyncIterator[protocol.ToFront]:
            if self.opened > 1:
                yield READY
            await is_killed.wait()
            is_killed.clear()

        def kill(self) -> None:
            is_killed.set()

    is_killed, workers = asyncio.Event(), Stopped()
    for module in ("connection", "watchdog"):
        monkeypatch.setattr(f"carpool.worker.{module}.INTERVAL_S", 0.01)

    supervisor = supervisor_of(monkeypatch, workers, timeout_s=0.02)
    supervisor.start()
    async with asyncio.timeout(10):
        await supervisor.wait_ready()
    assert workers.opened == 2
    is_killed.set()
    await supervisor.stop()


def test_a_worker_that_is_out_of_reach_is_never_given_up() -> None:
    restarts = Restarts()
    waits = [
        restarts.delay_s("", was_ready=False, is_lost=True, is_first=True)
        for _ in range(FIRST_TRIES * 3)
    ]
    assert waits == [*BACKOFF_S, *[BACKOFF_S[-1]] * (len(waits) - len(BACKOFF_S))]


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (-9, "signal 9, SIGKILL: killed, as the system does when memory runs out"),
        (-11, "signal 11, SIGSEGV: a library crashed"),
        (-15, "signal 15, SIGTERM"),
        (1, "it ended with exit code 1"),
    ],
)
def test_the_end_of_a_worker_is_told_in_words(status: int, told: str) -> None:
    assert describe_end(status) == told
    assert "it did not end by itself" in describe_end(status, is_killed=True)


async def test_a_worker_whose_requests_wait_for_each_other_is_followed_by_one_of_private_rides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Blocked(Scripted):
        """Each stands still at a line, until it is killed."""

        def __init__(self) -> None:
            super().__init__()
            self.loads, self.is_killed = list[str](), asyncio.Event()

        def send(self, message: protocol.ToWorker) -> None:
            if isinstance(message, protocol.LoadModel):
                self.loads.append(message.deadlock)

        def kill(self) -> None:
            self.is_killed.set()

        async def messages(self) -> AsyncIterator[protocol.ToFront]:
            self.is_killed.clear()
            yield READY
            if self.opened < 3:
                yield protocol.Deadlocked(f"mine.py:{self.opened}")
            await self.is_killed.wait()

    workers, deaths = Blocked(), list[bool]()

    deadlock = Deadlock()
    supervisor = supervisor_of(monkeypatch, workers, deadlock=deadlock)
    died = supervisor._requests.worker_died

    def note(death: Death) -> None:
        deaths.append(death.is_explained)
        died(death)

    supervisor._requests.worker_died = note  # type: ignore[method-assign]
    supervisor.start()
    await until(lambda: workers.opened == 3 and supervisor.takes_requests)
    assert deadlock.place == "mine.py:1"
    await supervisor.stop()

    assert workers.loads == ["", "mine.py:1", "mine.py:1"]
    assert deaths[:2] == [True, False]  # of the second one its requests may be guilty
    assert caplog.text.count("wait for each other at mine.py:1") == 1
