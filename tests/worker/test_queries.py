"""Questions to a worker whose asker may have left."""

import asyncio

from carpool.errors import WorkerLost
from carpool.worker import protocol
from carpool.worker.queries import Queries


def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    asyncio.run(_drops())


async def _drops() -> None:
    sent = list[protocol.ToWorker]()
    queries = Queries(sent.append)
    first, second = (queries.add_lora(name, f"/{name}") for name in ("one", "two"))
    first.cancel()

    queries.added([])
    queries.added(["no such file"])

    assert await second == ["no such file"]
    third = queries.add_lora("three", "/three")
    third.cancel()
    queries.worker_died(WorkerLost("gone"))
    assert len(sent) == 3
