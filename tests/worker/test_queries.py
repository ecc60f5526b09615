"""Questions to a worker whose asker may have left."""

from carpool.worker import protocol
from carpool.worker.queries import Queries


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
