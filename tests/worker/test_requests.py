"""The requests of one worker and its successors."""

import asyncio
from typing import Any

import pytest

from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.guilt import SUSPECT_DEATHS, CrashEvidence, Death, DeathLog
from carpool.worker.queries import Queries
from carpool.worker.requests import Moved, WorkerRequests


class Story:
    """A request that waits for a first worker, which dies, and may go on to a second one."""

    def __init__(self, *, is_suspect: bool = False, is_admitted: bool = False) -> None:
        self.sent = list[protocol.ToWorker]()
        self.outcome: Any = None
        self._evidence = CrashEvidence()
        if is_suspect:
            for _ in range(SUSPECT_DEATHS):
                self._evidence.died(Death(self, 0.0))
        self._is_admitted = is_admitted

    def play(self) -> list[protocol.Submit]:
        asyncio.run(self._play())
        return [message for message in self.sent if isinstance(message, protocol.Submit)]

    async def _play(self) -> None:
        now_s, loop = [100.0], asyncio.get_running_loop()
        loop.time = lambda: now_s[0]  # type: ignore[method-assign]
        requests = WorkerRequests(self.sent.append, None, lambda: None, deaths=DeathLog())
        run: Any = requests.run(
            CheckedRequest("a", 1, {}), None, None, waited_s=2.0, evidence=self._evidence,
            is_admitted=self._is_admitted,
        )  # fmt: skip
        task = asyncio.create_task(run)
        await asyncio.sleep(0)
        for later_s in (5.0, 30.0):
            now_s[0] += later_s
            requests.worker_is_ready()
            requests.receive(protocol.Started("a"))
            requests.worker_died(Death(requests, now_s[0]))
            await asyncio.sleep(0)
        task.cancel()
        [self.outcome] = await asyncio.gather(task, return_exceptions=True)


def test_the_time_before_a_worker_came_and_that_of_one_that_died_count_towards_timeouts() -> None:
    waited_s = [message.waited_s for message in Story(is_suspect=True).play()]
    assert waited_s == [pytest.approx(7.0), pytest.approx(37.0)]


def test_only_the_worker_that_gets_a_request_first_may_refuse_it_for_what_it_takes() -> None:
    assert [message.is_admitted for message in Story(is_suspect=True).play()] == [False, True]
    assert [message.is_admitted for message in Story(is_admitted=True).play()] == [True]


def test_what_a_worker_had_that_died_moves_unless_it_is_suspect() -> None:
    story = Story()
    assert len(story.play()) == 1
    assert isinstance(story.outcome, Moved)


# Questions to a worker whose asker may have left


async def test_each_answer_goes_to_its_query_and_others_are_dropped() -> None:
    sent = list[protocol.Ask]()
    queries = Queries(lambda message: sent.append(message))  # type: ignore[arg-type]
    first, second, third = (queries.ask(protocol.GetStatistics()) for _ in range(3))
    first.cancel()

    for ask in reversed(sent[:2]):
        queries.answered(protocol.Answer(ask.number, ask.number))
    queries.answered(protocol.Answer(sent[0].number - 1, "of an earlier front"))

    assert await second == sent[1].number
    assert not third.done()
