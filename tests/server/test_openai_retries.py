"""OpenAI's own SDK tries again when, and only when, the server says that it may help.

One model is served, or two.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2
import openai
import pytest

from carpool import errors
from carpool.config import ServeSettings
from carpool.server.app import create_app
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import CARD, Grey, fleet_of, idle_jobs

TRIES = 3  # the SDK's own: once, and two again
SOON_S = 0.01


class Moody(Grey):
    """Fails so often before it draws."""

    def __init__(self, *failures: errors.CarpoolError) -> None:
        super().__init__()
        self._failures = list(failures)

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        if self._failures:
            self.jobs.append(request)
            raise self._failures.pop(0)
        return await super().submit(request)


Generate = Callable[..., Any]


@pytest.fixture(params=["one model", "two models"])
def generate(request: pytest.FixtureRequest) -> Generate:
    """What an SDK left to its defaults makes of a worker, as a function."""
    return partial(_generate, has_several=request.param == "two models")


def _generate(worker: Grey, *, has_several: bool, **options: Any) -> Any:
    async def talk() -> Any:
        several = fleet_of(worker, Grey(), names=(CARD.id, "other"))
        app = create_app(
            several if has_several else fleet_of(worker), ServeSettings(port=0), idle_jobs()
        )
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http
        ) as client:
            answer = await client.images.generate(prompt="a", extra_body={"seed": 5}, **options)
            return [event async for event in answer] if options.get("stream") else answer

    return asyncio.run(talk())


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=["at once", "stream"])
@pytest.mark.parametrize(
    "failure",
    [errors.Overloaded, errors.RateLimited, errors.Starting, errors.WorkerLost, errors.Draining],
)
def test_what_will_pass_is_tried_again_until_there_is_a_picture(
    generate: Generate, failure: type[errors.CarpoolError], options: dict[str, Any]
) -> None:
    worker = Moody(*[failure("not now", retry_after_s=SOON_S)] * (TRIES - 1))

    answer = generate(worker, **options)

    assert len(worker.jobs) == TRIES
    [picture] = answer if options else answer.data
    assert picture.seed == 5
    assert picture.b64_json


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=["at once", "stream"])
@pytest.mark.parametrize("failure", [errors.DeadlineExceeded, errors.PipelineFailed])
def test_what_would_fail_again_is_asked_once(
    generate: Generate, failure: type[errors.CarpoolError], options: dict[str, Any]
) -> None:
    worker = Moody(*[failure("as ever")] * TRIES)

    with pytest.raises(openai.InternalServerError, match="as ever") as caught:
        generate(worker, **options)

    assert len(worker.jobs) == 1
    assert caught.value.code == failure.code
    assert caught.value.request_id


def test_who_stays_overloaded_is_given_up_with_its_own_error(generate: Generate) -> None:
    worker = Moody(*[errors.Overloaded("full", retry_after_s=SOON_S)] * TRIES)

    with pytest.raises(openai.RateLimitError, match="full") as caught:
        generate(worker)

    assert len(worker.jobs) == TRIES
    assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
    assert caught.value.response.headers["retry-after-ms"] == "10"
