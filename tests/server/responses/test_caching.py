"""What caches and browsers may do with answers: nothing of a client reaches another one by them."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from carpool.config import ServeSettings
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.server.app import create_app
from carpool.server.transport.middleware import RequestLogging
from support.app import CARD, Grey, client_of, fleet_of, shared_app
from support.endpoints import ENDPOINT

GETS = sorted(
    {"/v1/events": "/v1/events?seconds=0"}.get(path, path)  # else it would not end
    for path, item in shared_app().openapi()["paths"].items()
    if "get" in item
)
OF_THE_WORKER = {"/stats", "/metrics"}
WORK: dict[str, Any] = {"prompt": "a"}


def asked(*requests: dict[str, Any], **settings: Any) -> list[httpx2.Response]:
    """Ask an application with jobs; `{job}` and `{video}` are completed ones."""

    def write(folder: Path) -> None:
        for name in ("0.png", "video.mp4", "thumbnail.webp", "spritesheet.jpg"):
            (folder / name).write_bytes(b"<html>" * 50)

    async def talk() -> list[httpx2.Response]:
        settings_ = ServeSettings(port=0, **settings)
        with closing(JobStore()) as store:
            runner = Runner(store, Grey(), {}, model=lambda: CARD.id, max_running=1)
            app = create_app(fleet_of(Grey()), settings_, runner)
            jobs = {kind: store.submit(kind, {}, {}).id for kind in ("image", "video")}
            store.take(2)
            for job in jobs.values():
                store.complete(job, write)
            async with client_of(app) as client:
                answers = []
                for request in requests:
                    url = request.pop("url").format(job=jobs["image"], video=jobs["video"])
                    method = request.pop("method", "GET")
                    answers.append(await client.request(method, url, **request))
            await runner.stop()
            return answers

    return asyncio.run(talk())


def is_stored_by_nobody(answer: httpx2.Response) -> bool:
    return answer.headers["cache-control"] == "no-store"


FILES = (
    "/v1/jobs/{job}/files/0.png",
    "/v1/videos/{video}/content",
    "/v1/videos/{video}/content?variant=thumbnail",
    "/v1/videos/{video}/content?variant=spritesheet",
)


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({}, 200), ({"headers": {"range": "bytes=0-4"}}, 206),
        ({"headers": {"range": "bytes=0-4,9-12"}}, 206), ({"headers": {"if-none-match": "*"}}, 304),
        ({"method": "HEAD"}, 200),
    ],
)  # fmt: skip
def test_a_file_of_a_job_is_for_its_client_alone_and_what_it_says_it_is(
    how: dict[str, Any], status: int
) -> None:
    for answer in asked(*({"url": url, **how} for url in FILES)):
        assert answer.status_code == status, answer.url
        assert answer.headers["cache-control"] == "private, no-cache"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "etag" in answer.headers  # to ask again is cheap
        assert status == 304 or answer.headers["content-disposition"].startswith("attachment")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"url": ENDPOINT, "method": "POST", "json": WORK}, 200),
        ({"url": ENDPOINT, "method": "POST", "json": {**WORK, "stream": True}}, 200),
        ({"url": ENDPOINT, "method": "POST", "json": {**WORK, "background_job": True}}, 202),
        ({"url": ENDPOINT, "method": "POST", "json": {}}, 400),
        ({"url": ENDPOINT, "method": "POST", "json": {"prompt": "x" * 2_000_000}}, 413),
        ({"url": ENDPOINT, "method": "POST", "content": "x"}, 415),
        ({"url": "/v1/jobs"}, 200),
        ({"url": "/v1/jobs/{job}"}, 200),
        ({"url": "/v1/jobs/{job}/files/1.png"}, 404),
        ({"url": "/v1/jobs/{job}/files/0.png", "headers": {"range": "bytes=999-"}}, 416),
        ({"url": "/v1/jobs/image_0"}, 404),
        ({"url": "/v1/videos/{video}"}, 200),
        ({"url": "/v1/files/file-0.png"}, 404),
        ({"url": "/nowhere"}, 404),
        ({"url": ENDPOINT}, 405),
        ({"url": "/v1/jobs/{job}", "method": "DELETE"}, 200),
    ],
)
def test_every_other_answer_is_stored_by_nobody(request_: dict[str, Any], status: int) -> None:
    [answer] = asked(request_.copy())

    assert answer.status_code == status
    assert is_stored_by_nobody(answer)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert len(answer.headers.get_list("cache-control")) == 1


@pytest.mark.parametrize("settings", [{}, {"api_key": ("one",)}])
def test_whatever_can_be_got_says_how_it_may_be_stored(settings: dict[str, Any]) -> None:
    paths = [*sorted(set(GETS) - OF_THE_WORKER), "/docs", "/openapi.json"]
    urls = [path.replace("{", "{{").replace("}", "}}") for path in paths]
    requests = [{"url": url, "method": method} for url in urls for method in ("GET", "HEAD")]
    for answer in asked(*requests, **settings):
        assert is_stored_by_nobody(answer), answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_linked_picture_is_its_clients_for_as_long_as_the_link() -> None:
    async with client_of(shared_app()) as client:
        wish = {**WORK, "response_format": "url"}
        url = (await client.post(ENDPOINT, json=wish)).json()["data"][0]["url"]
        answer = await client.get(url)

    assert answer.headers["cache-control"] == "private, max-age=3600"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_failure_that_nobody_foresaw_is_stored_by_nobody() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async with client_of(RequestLogging(app)) as client:
        answer = await client.get("/")

    assert (answer.status_code, is_stored_by_nobody(answer)) == (500, True)
