"""The requests of one worker and its successors."""

import asyncio
from typing import Any

import pytest

from carpool.types import CheckedRequest, JournalEntry
from carpool.worker import protocol
from carpool.worker.guilt import Death, DeathLog
from carpool.worker.journals import Journals
from carpool.worker.requests import WorkerRequests


def sent_to_workers(
    *, is_one_of_several: bool, journals: Journals | None = None
) -> list[protocol.Submit]:
    """What the workers get of a request that waits for the first of them, which dies."""
    sent = list[protocol.ToWorker]()

    async def story() -> None:
        now_s, loop = [100.0], asyncio.get_running_loop()
        loop.time = lambda: now_s[0]  # type: ignore[method-assign]
        requests = WorkerRequests(
            sent.append,
            journals,
            lambda: None,
            is_one_of_several=is_one_of_several,
            deaths=DeathLog(),
        )
        run: Any = requests.run(CheckedRequest("a", 1, {}), None, None, waited_s=2.0)
        task = asyncio.create_task(run)
        await asyncio.sleep(0)
        for later_s in (5.0, 30.0):
            now_s[0] += later_s
            requests.worker_is_ready()
            requests.receive(protocol.Started("a"))
            requests.worker_died(Death(requests, now_s[0]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())

    return [one for one in sent if isinstance(one, protocol.Submit)]


def test_the_time_before_a_worker_came_and_that_of_one_that_died_count_towards_timeouts() -> None:
    waited_s = [one.waited_s for one in sent_to_workers(is_one_of_several=False)]
    assert waited_s == [pytest.approx(7.0), pytest.approx(37.0)]


def test_only_a_lone_worker_that_gets_a_request_first_may_refuse_it_for_what_it_takes() -> None:
    alone, shared = (sent_to_workers(is_one_of_several=several) for several in (False, True))
    assert [one.is_admitted for one in alone] == [False, True]
    assert [one.is_admitted for one in shared] == [True]


def test_what_an_earlier_server_began_is_not_refused_any_more() -> None:
    journals = Journals()
    journals.open("a", [JournalEntry(3, b"mark", b"")])
    begun = sent_to_workers(is_one_of_several=False, journals=journals)
    assert [one.is_admitted for one in begun] == [True, True]
