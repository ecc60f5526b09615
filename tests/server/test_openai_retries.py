"""OpenAI's own SDK tries again when, and only when, the server says that it may help."""

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    Draining,
    Overloaded,
    PipelineFailed,
    RateLimited,
    Starting,
    WorkerLost,
)
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import Grey, app_of

TRIES = 3  # the SDK's own: once, and two again
SOON_S = 0.01


class Moody(Grey):
    """Fails so often before it draws."""

    def __init__(self, *failures: CarpoolError) -> None:
        super().__init__()
        self._failures = list(failures)

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        if self._failures:
            self.jobs.append(request)
            raise self._failures.pop(0)
        return await super().submit(request)


def generate(worker: Grey, **options: Any) -> Any:
    """What an SDK left to its defaults makes of that worker."""

    async def talk() -> Any:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(worker)))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http
        ) as client:
            answer = await client.images.generate(prompt="a", extra_body={"seed": 5}, **options)
            return [event async for event in answer] if options.get("stream") else answer

    return asyncio.run(talk())


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=["at once", "stream"])
@pytest.mark.parametrize("failure", [Overloaded, RateLimited, Starting, WorkerLost, Draining])
def test_what_will_pass_is_tried_again_until_there_is_a_picture(
    failure: type[CarpoolError], options: dict[str, Any]
) -> None:
    worker = Moody(*[failure("not now", retry_after_s=SOON_S)] * (TRIES - 1))

    answer = generate(worker, **options)

    assert len(worker.jobs) == TRIES
    [picture] = answer if options else answer.data
    assert picture.seed == 5
    assert picture.b64_json


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=["at once", "stream"])
@pytest.mark.parametrize("failure", [DeadlineExceeded, PipelineFailed])
def test_what_would_fail_again_is_asked_once(
    failure: type[CarpoolError], options: dict[str, Any]
) -> None:
    worker = Moody(*[failure("as ever")] * TRIES)

    with pytest.raises(openai.InternalServerError, match="as ever") as caught:
        generate(worker, **options)

    assert len(worker.jobs) == 1
    assert caught.value.code == failure.code
    assert caught.value.request_id


def test_who_stays_overloaded_is_given_up_with_its_own_error() -> None:
    worker = Moody(*[Overloaded("full", retry_after_s=SOON_S)] * TRIES)

    with pytest.raises(openai.RateLimitError, match="full") as caught:
        generate(worker)

    assert len(worker.jobs) == TRIES
    assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
    assert caught.value.response.headers["retry-after-ms"] == "10"
