"""SignedFiles and other answers as players, browsers and `curl -I` ask for them."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from carpool.config import ServeSettings
from carpool.server.access.signed_links import SignedFiles
from carpool.server.app import create_app
from support.app import Grey, answer_of, app_of, client_of, fleet_of, idle_jobs, refusal, shared_app
from support.endpoints import ENDPOINT

GETS = sorted(
    {"/v1/events": "/v1/events?seconds=0"}.get(path, path)  # else it would not end
    for path, item in shared_app().openapi()["paths"].items()
    if "get" in item
)
OF_THE_WORKER = {"/stats", "/metrics"}


def asked(*headers: dict[str, str], method: str = "GET") -> tuple[bytes, list[httpx2.Response]]:
    """Ask for a linked picture whole, and then so; gives the picture and the other answers."""

    async def talk() -> tuple[bytes, list[httpx2.Response]]:
        async with client_of(app_of(Grey())) as client:
            wish = {"prompt": "a", "response_format": "url"}
            url = (await client.post(ENDPOINT, json=wish)).json()["data"][0]["url"]
            whole = await client.get(url)
            assert whole.status_code == 200
            places = {name: whole.headers[name] for name in ("etag", "last-modified")}
            answers = [
                await client.request(
                    method, url, headers={key: text.format(**places) for key, text in one.items()}
                )
                for one in headers
            ]
            return whole.content, answers

    return asyncio.run(talk())


# Parts


@pytest.mark.parametrize(
    ("asks", "part"),
    [("bytes=0-4", slice(0, 5)), ("bytes=5-", slice(5, None)), ("bytes=-5", slice(-5, None)),
     ("BYTES= 0-99999999", slice(0, None)), ("bytes=-99999999", slice(0, None)),
     ("bytes=0-4, 99999999-", slice(0, 5))],
)  # fmt: skip
def test_a_range_is_a_part_of_the_file(asks: str, part: slice) -> None:
    whole, [answer] = asked({"range": asks})

    assert (answer.status_code, answer.content) == (206, whole[part])
    start, stop, _ = part.indices(len(whole))
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(whole)}"


@pytest.mark.parametrize(
    "asks",
    ["", "bytes", "bytes=", "bytes=-", "bytes=5", "bytes=a-b", "bytes=5-2", "bytes=--5",
     "bytes=+1-2", "bytes=1_0-", "lines=0-4", "bytes=0-4,", "bytes=0-4;5-6", "0-4",
     "bytes=0-" + "9" * 5000, "bytes=" + "0-0," * 500 + "0-0"],
    ids=lambda asks: asks[:12],
)  # fmt: skip
def test_a_range_that_says_nothing_is_ignored(asks: str) -> None:
    whole, [answer] = asked({"range": asks})

    assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize("asks", ["bytes=99999999-", "bytes=99999999-999999999", "bytes=-0"])
def test_a_range_behind_the_end_is_refused_with_the_size(asks: str) -> None:
    whole, [answer] = asked({"range": asks})

    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(whole)}"
    told = refusal(answer)
    assert told["code"] == "range_not_satisfiable"
    assert f"the file has {len(whole)} bytes" in told["message"]


def test_two_ranges_come_together() -> None:
    whole, [answer] = asked({"range": "bytes=0-1,5-6"})

    assert answer.status_code == 206
    assert answer.headers["content-type"].startswith("multipart/byteranges")
    assert whole[0:2] in answer.content
    assert whole[5:7] in answer.content


def test_a_part_is_for_those_who_have_the_rest() -> None:
    whole, [same, other] = asked(
        {"range": "bytes=0-4", "if-range": "{etag}"}, {"range": "bytes=0-4", "if-range": '"x"'}
    )

    assert (same.status_code, other.status_code) == (206, 200)
    assert other.content == whole


# What the client has already


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"if-none-match": "{etag}"}, 304), ({"if-none-match": 'W/{etag}, "other"'}, 304),
     ({"if-none-match": "*"}, 304), ({"if-none-match": '"other"'}, 200),
     ({"if-modified-since": "{last-modified}"}, 304),
     ({"if-modified-since": "Thu, 01 Jan 1970 00:00:00 GMT"}, 200),
     ({"if-modified-since": "yesterday"}, 200), ({"if-modified-since": ""}, 200),
     ({"if-none-match": '"other"', "if-modified-since": "{last-modified}"}, 200),
     ({"if-none-match": "{etag}", "range": "bytes=0-4"}, 304)],
)  # fmt: skip
def test_what_the_client_has_is_not_sent_again(headers: dict[str, str], status: int) -> None:
    whole, [answer] = asked(headers)

    assert (answer.status_code, answer.content) == (status, whole if status == 200 else b"")
    assert answer.headers["etag"]


# A picture that goes while its link is followed


async def test_a_file_that_is_gone_is_not_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(SignedFiles, "get", lambda *_: tmp_path / "file-gone.png")

    async with client_of(create_app(fleet_of(Grey()), ServeSettings(), idle_jobs())) as client:
        answer = await client.get("/v1/files/file-gone.png")

    assert (answer.status_code, refusal(answer)["code"]) == (404, "file_not_found")


# HEAD, and methods that a path does not have


def test_the_head_of_a_file_is_that_of_the_whole_file() -> None:
    whole, answers = asked({}, {"range": "bytes=0-4"}, method="HEAD")

    for answer in answers:
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == str(len(whole))
        assert answer.headers["content-type"] == "image/png"


@pytest.mark.parametrize("path", [*sorted(set(GETS) - OF_THE_WORKER), "/docs", "/openapi.json"])
def test_whatever_can_be_got_has_a_head(path: str) -> None:
    got, head = (answer_of(shared_app(), method, path) for method in ("GET", "HEAD"))

    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


def test_heads_are_not_in_the_document() -> None:
    methods = {method for item in shared_app().openapi()["paths"].values() for method in item}

    assert methods == {"get", "post", "delete"}


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", ENDPOINT, "POST"), ("HEAD", ENDPOINT, "POST"), ("OPTIONS", ENDPOINT, "POST"),
     ("POST", "/health", "GET, HEAD"), ("DELETE", "/v1/models", "GET, HEAD"),
     ("PATCH", "/v1/jobs/x", "GET, HEAD, DELETE"), ("DELETE", "/v1/videos", "GET, HEAD, POST"),
     ("PUT", "/v1/files/x", "GET, HEAD"), ("BREW", "/openapi.json", "GET, HEAD")],
)  # fmt: skip
def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allow: str) -> None:
    answer = answer_of(shared_app(), method, path)

    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert method == "HEAD" or refusal(answer)["code"] == "method_not_allowed"


def test_the_document_says_how_files_are_answered() -> None:
    paths = shared_app().openapi()["paths"]

    for path in ("/v1/files/{file_id}", "/v1/jobs/{job_id}/files/{name}",
                 "/v1/videos/{video_id}/content"):  # fmt: skip
        responses = paths[path]["get"]["responses"]
        assert responses.keys() >= {"200", "206", "304", "405", "416"}
        assert "Error" in json.dumps(responses["416"])
