"""Deliveries of a store: made at least once, in order, through failures and ends of the server."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import Cancelled, InvalidValue
from carpool.jobs.database import Record
from carpool.jobs.outbox import Courier, waiting
from carpool.jobs.store import JobStore
from support.job_store import Hand, killed, submit, writes

WAITS_S = (1.0, 10.0)


class Receiver:
    """Takes deliveries, but the first ones."""

    def __init__(self, refusals: int = 0, **result: Any) -> None:
        self.refusals, self.result, self.got = refusals, result, list[Record]()

    async def __call__(self, record: Record) -> dict[str, Any]:
        self.got.append(record)
        if len(self.got) <= self.refusals:
            raise InvalidValue("webhook: the URL answers with status 500")
        return self.result


async def courier_until(
    store: JobStore, is_so: Callable[[], bool], hand: Hand, **senders: Callable[..., Awaitable[Any]]
) -> None:
    """Run a courier until something is so; time passes in ten seconds a turn of the loop."""
    courier = Courier(store, senders, WAITS_S)
    running = asyncio.create_task(courier.run())
    try:
        async with asyncio.timeout(30):
            while not is_so():
                hand.pass_by(10)
                courier.ended()
                await asyncio.sleep(0.001)
    finally:
        running.cancel()


def completed(store: JobStore, **options: Any) -> Record:
    job = submit(store, **options)
    store.take(1)
    assert store.complete(job.id, writes(a_txt=b"a"))
    return job


def state_of(store: JobStore, job: Record) -> dict[str, tuple[str, int]]:
    deliveries = store.get(job.id).deliveries or {}
    return {kind: (entry["state"], entry["attempts"]) for kind, entry in deliveries.items()}


def test_a_delivery_that_fails_is_made_again_and_what_comes_after_it_waits(tmp_path: Path) -> None:
    hand, upload, webhook = Hand(), Receiver(1, files=["s3://b/a"]), Receiver(2)
    store = JobStore(tmp_path, clock=hand.run())
    job = completed(store, deliveries={"webhook": waiting(url="https://a"), "upload": waiting()})
    plain = completed(store)

    def is_done() -> bool:
        return state_of(store, job) == {"webhook": ("delivered", 3), "upload": ("delivered", 2)}

    asyncio.run(courier_until(store, is_done, hand, upload=upload, webhook=webhook))

    assert webhook.got[0].deliveries["upload"]["files"] == ["s3://b/a"]  # type: ignore[index]
    assert {record.id for record in upload.got + webhook.got} == {job.id}
    assert store.get(plain.id).deliveries is None
    assert store.deliveries_due() == []
    store.close()


def test_attempts_have_an_end_and_the_last_error_is_kept(tmp_path: Path) -> None:
    hand = Hand()
    store = JobStore(tmp_path, clock=hand.run())
    job, end = completed(store, deliveries={"webhook": waiting()}), ("failed", len(WAITS_S) + 1)
    is_over = lambda: state_of(store, job)["webhook"] == end  # noqa: E731

    asyncio.run(courier_until(store, is_over, hand, webhook=Receiver(99)))

    assert "status 500" in (store.get(job.id).deliveries or {})["webhook"]["error"]
    store.close()


@pytest.mark.parametrize("attempts", [0, 1])
def test_what_a_killed_server_had_not_delivered_its_successor_delivers(
    tmp_path: Path, attempts: int
) -> None:
    hand, first = Hand(), Receiver(99)
    store = JobStore(tmp_path, clock=hand.run())
    job = completed(store, deliveries={"webhook": waiting()})
    if attempts:
        tried = lambda: state_of(store, job)["webhook"] == ("waiting", 1)  # noqa: E731
        asyncio.run(courier_until(store, tried, hand, webhook=first))
    killed(store)
    hand.suspend(1e6)

    store, second = JobStore(tmp_path, clock=hand.run()), Receiver()
    done = lambda: state_of(store, job)["webhook"] == ("delivered", attempts + 1)  # noqa: E731
    asyncio.run(courier_until(store, done, hand, webhook=second))

    assert [record.id for record in second.got] == [job.id]
    store.close()


def test_a_job_that_has_not_ended_is_not_told_of_and_one_that_is_cancelled_is(
    tmp_path: Path,
) -> None:
    hand, webhook = Hand(), Receiver()
    store = JobStore(tmp_path, clock=hand.run())
    waits = submit(store, deliveries={"webhook": waiting()})
    ends = submit(store, deliveries={"webhook": waiting()})
    store.end(ends.id, "cancelled", Cancelled("enough"))

    asyncio.run(courier_until(store, lambda: bool(webhook.got), hand, webhook=webhook))

    assert [(record.id, record.state) for record in webhook.got] == [(ends.id, "cancelled")]
    assert state_of(store, waits) == {"webhook": ("waiting", 0)}
    store.close()
