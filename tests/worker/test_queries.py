"""Questions to a worker whose asker may have left."""

from carpool.worker import protocol
from carpool.worker.queries import LateAdapters


async def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    sent = list[protocol.ToWorker]()
    adapters = LateAdapters(sent.append)
    first, second = (adapters.add(name, f"/{name}", is_ready=True) for name in ("one", "two"))
    first.cancel()

    adapters.added([])
    adapters.added(["no such file"])

    assert await second == ["no such file"]
    third = adapters.add("three", "/three", is_ready=True)
    third.cancel()
    adapters.worker_died()
    assert len(sent) == 3
