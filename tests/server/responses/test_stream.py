"""Streams of events: in order, framed as the SDK reads them, never ending without a word."""

import asyncio
import base64
import json
from typing import Any

import httpx2
import pytest
from fastapi.sse import KEEPALIVE_COMMENT

from carpool.errors import Overloaded, WorkerLost
from carpool.server.bodies import schema
from carpool.server.image_request import ParsedImageRequest
from carpool.server.responses.stream import events
from carpool.server.state import ServedModel
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import CARD, Grey, app_of, ask, client_of, fleet_of, refusal
from support.endpoints import ENDPOINT
from support.pictures import picture

PING = KEEPALIVE_COMMENT.decode().strip()


class Showing(Grey):
    """Shows a preview for each that is wanted, then draws, or fails."""

    def __init__(self, error: Exception | None = None, *, fails_at: int = 0) -> None:
        super().__init__()
        self.error, self.fails_at = error, fails_at

    async def submit(
        self, request: CheckedRequest, on_progress: Any = None, on_preview: Any = None, **_: Any
    ) -> protocol.Done:
        if self.error is not None and self.fails_at == 0:
            raise self.error
        for step in range(1, request.previews + 1):
            on_progress(step, 4)
            small = protocol.Picture(8, 8, bytes([50 * step]) * 3 * 8 * 8)
            on_preview(protocol.Preview(request.request_id, step, 4, small))
            await asyncio.sleep(0)  # others have their turn
            if self.error is not None and self.fails_at == step:
                raise self.error
        return await super().submit(request)


def stream(worker: Grey, **body: Any) -> httpx2.Response:
    return ask(json.dumps({"prompt": "a", "stream": True, **body}), worker=worker)


def told(answer: httpx2.Response) -> list[tuple[str, Any]]:
    """Events with their data; pings have neither."""
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("\n\n")
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if block.startswith(":"):
            assert block == PING
        elif lines["data"] == "[DONE]":
            found.append(("[DONE]", None))
        else:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_previews_come_first_then_the_picture_then_the_end() -> None:
    found = told(stream(Showing(), partial_images=2, seed=7))

    assert [name for name, _ in found] == [
        "image_generation.partial_image", "image_generation.partial_image",
        "image_generation.completed", "[DONE]",
    ]  # fmt: skip
    for index, (name, event) in enumerate(found[:2]):
        assert event["type"] == name
        assert (event["partial_image_index"], event["step"], event["steps"]) == (
            index, index + 1, 4,
        )  # fmt: skip
        assert (event["seed"], event["image_index"], event["size"]) == (7, 0, "8x8")
        assert picture(base64.b64decode(event["b64_json"])).getpixel((0, 0)) == (
            (50 * (index + 1),) * 3
        )
    last = found[2][1]
    assert picture(base64.b64decode(last["b64_json"])).size == (16, 16)
    assert last["usage"]["total_tokens"] == 2


def test_a_truncated_prompt_is_told_with_the_picture() -> None:
    class Truncating(Showing):
        async def submit(self, *args: Any, **kwargs: Any) -> protocol.Done:
            done = await super().submit(*args, **kwargs)
            done.warnings, done.skipped_steps = ["your prompt was truncated"], 2
            return done

    *_, (_, warned), _ = told(stream(Truncating(), partial_images=1))
    *_, (_, plain), _ = told(stream(Showing(), partial_images=1))

    assert (warned["warnings"], warned["skipped_steps"]) == (["your prompt was truncated"], 2)
    assert {"warnings", "skipped_steps"}.isdisjoint(plain)


def test_a_worker_that_dies_meanwhile_is_a_comment_and_no_preview_comes_twice() -> None:
    class Reborn(Showing):
        async def submit(
            self, request: CheckedRequest, on_progress: Any = None, on_preview: Any = None, **_: Any
        ) -> Any:
            for step in (1, 2):
                on_preview(
                    protocol.Preview(request.request_id, step, 4, protocol.Picture(1, 1, b"abc"))
                )
            on_progress(0, 0)
            return await super().submit(request, on_progress, on_preview)

    answer = stream(Reborn(), partial_images=3)

    blocks = answer.text.split("\n\n")[:-1]
    again = blocks.index(": the worker died; the request is run again")
    assert again > 0
    shown = [json.loads(b.split("data: ")[1]) for b in blocks if "partial_image" in b]
    assert [event["step"] for event in shown] == [1, 2, 3]
    assert [event["partial_image_index"] for event in shown] == [0, 1, 2]


def test_headers_keep_proxies_from_holding_events_back() -> None:
    headers = stream(Showing(), partial_images=1).headers

    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
    assert headers["x-request-id"]
    assert int(headers["openai-processing-ms"]) >= 0


def test_without_partial_images_there_is_only_the_picture() -> None:
    for options in ({}, {"partial_images": 0}, {"partial_images": None}):
        assert [name for name, _ in told(stream(Showing(), **options))] == [
            "image_generation.completed",
            "[DONE]",
        ]


def test_each_of_several_pictures_says_which_it_is() -> None:
    found = told(stream(Showing(), n=2, partial_images=1, seed=3, user="somebody"))[:-1]

    for kind in ("partial_image", "completed"):
        of = [event for name, event in found if name.endswith(kind)]
        assert sorted((event["image_index"], event["seed"]) for event in of) == [(0, 3), (1, 4)]
    completed = [event for name, event in found if name.endswith("completed")]
    assert {event["safety_identifier"] for event in completed} == {"somebody"}


def test_what_is_refused_at_once_keeps_its_status_and_its_hint() -> None:
    answer = stream(Showing(Overloaded("the queue is full", retry_after_s=2)))

    assert refusal(answer)["code"] == "queue_full"
    assert (answer.status_code, answer.headers["retry-after-ms"]) == (429, "2000")


def test_a_wrong_request_is_refused_before_anything_runs() -> None:
    worker = Showing()
    for wrong in ({"n": 0}, {"size": "7x7"}, {"partial_images": 4}, {"partial_images": "1"}):
        assert stream(worker, **wrong).status_code == 400
    told = refusal(stream(worker, response_format="url"))
    assert (told["code"], told["param"]) == ("unsupported_parameter", "response_format")
    told = refusal(stream(worker, background_job=True))
    assert (told["code"], told["param"]) == ("unsupported_parameter", "stream")
    assert not worker.jobs


def test_a_failure_after_the_beginning_is_the_last_event() -> None:
    found = told(stream(Showing(WorkerLost("it died"), fails_at=1), partial_images=3))

    assert [name for name, _ in found] == ["image_generation.partial_image", "error"]
    assert found[-1][1] == {
        "error": {
            "message": "it died", "type": "server_error", "param": None, "code": "worker_lost",
        }
    }  # fmt: skip


def test_a_defect_of_ours_is_told_without_its_secrets(caplog: pytest.LogCaptureFixture) -> None:
    found = told(stream(Showing(RuntimeError("secret"), fails_at=1), partial_images=1))

    assert found[-1][0] == "error"
    assert found[-1][1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(found)
    assert "secret" in caplog.text


def test_one_failure_gives_up_the_other_pictures() -> None:
    class OneFails(Grey):
        async def submit(
            self, request: CheckedRequest, on_progress: Any = None, on_preview: Any = None, **_: Any
        ) -> protocol.Done:
            if request.seed == 1:
                on_progress(1, 4)
                await self.until(lambda: self.running == 1)
                raise WorkerLost("it died")
            return await super().submit(request)

    worker = OneFails(is_slow=True)

    found = told(stream(worker, n=2, seed=1))

    assert [name for name, _ in found] == ["error"]
    assert worker.running == 0


def test_the_images_of_one_request_are_marked_as_asked_for_together() -> None:
    model = ServedModel(CARD.id, CARD, 10)
    body = schema.ImageRequest.model_validate({"prompt": "a", "n": 3})

    first, second, third = ParsedImageRequest(model, body).requests

    assert first.group == second.group == third.group == first.request_id
    assert (first.group_size, third.group_size) == (3, 3)


async def _three_of(worker: Grey) -> list[bytes]:
    model = ServedModel(CARD.id, CARD, 10)
    body = schema.ImageRequest.model_validate({"prompt": "a", "n": 2})
    generation = ParsedImageRequest(model, body)
    stream = events(
        fleet_of(worker), generation, on_output=lambda images, usage: None,
        previewed=lambda seconds: None,
        run=asyncio.to_thread, heartbeat_s=0.001,
    )  # fmt: skip
    found = [await anext(stream) for _ in range(3)]
    assert worker.running == 2
    await stream.aclose()  # type: ignore[attr-defined]
    await worker.until(lambda: worker.running == 0)
    return found


def test_silence_is_broken_by_pings_and_whoever_leaves_ends_the_work() -> None:
    worker = Grey(is_slow=True)

    assert asyncio.run(_three_of(worker)) == [KEEPALIVE_COMMENT] * 3
    assert len(worker.jobs) == 2


def test_a_client_that_leaves_a_stream_ends_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    class Moving(Grey):
        async def submit(
            self, request: CheckedRequest, on_progress: Any = None, on_preview: Any = None, **_: Any
        ) -> protocol.Done:
            on_progress(1, 4)
            return await super().submit(request)

    worker = Moving(is_slow=True)

    async def leave() -> None:
        sent = asyncio.Event()
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.set()

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": ENDPOINT}
        scope |= {"raw_path": ENDPOINT.encode()}
        scope |= {"headers": [(b"content-type", b"application/json")], "query_string": b""}
        scope |= {"asgi": {"spec_version": "2.3"}, "scheme": "http", "server": ("test", 80)}
        task = asyncio.create_task(app_of(worker)(scope, incoming.get, send))
        await sent.wait()
        assert worker.running == 1
        incoming.put_nowait({"type": "http.disconnect"})
        await task

    caplog.set_level("INFO", "carpool.access")
    asyncio.run(leave())

    assert worker.running == 0
    [line] = [one for one in caplog.records if one.name == "carpool.access"]
    assert vars(line)["status"] == 499


# Asked again with the same key

KEY = {"idempotency-key": "k"}


async def streamed(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    sent = {"prompt": "a", "stream": True, "partial_images": 2, **body}
    return await client.post(ENDPOINT, json=sent, headers=KEY)


def test_a_stream_that_is_asked_for_again_gives_the_same_picture_without_work() -> None:
    async def twice(worker: Grey) -> list[httpx2.Response]:
        async with client_of(app_of(worker)) as client:
            first, second = await streamed(client), await streamed(client)
            return [first, second, await streamed(client, prompt="b")]

    worker = Showing()
    first, second, other = asyncio.run(twice(worker))

    assert [name for name, _ in told(second)] == ["image_generation.completed", "[DONE]"]
    assert told(second) == told(first)[2:]
    assert refusal(other)["code"] == "idempotency_mismatch"
    assert len(worker.jobs) == 1


def test_who_asks_again_while_it_runs_waits_for_the_same_picture_though_the_first_leaves() -> None:
    class Gated(Grey):
        def __init__(self) -> None:
            super().__init__()
            self.may_end = asyncio.Event()

        async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
            self._count(+1)
            await self.may_end.wait()
            return await super().submit(request)

    async def both(worker: Gated) -> httpx2.Response:
        async with client_of(app_of(worker)) as client:
            first = asyncio.create_task(streamed(client))
            await worker.until(lambda: worker.running == 1)
            second = asyncio.create_task(streamed(client))
            for _ in range(500):  # until it waits, too
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            worker.may_end.set()
            return await second

    worker = Gated()
    found = told(asyncio.run(both(worker)))

    assert [name for name, _ in found] == ["image_generation.completed", "[DONE]"]
    assert len(worker.jobs) == 1


def test_a_stream_that_failed_is_done_anew() -> None:
    class Once(Showing):
        async def submit(
            self, request: CheckedRequest, on_progress: Any = None, on_preview: Any = None, **_: Any
        ) -> Any:
            try:
                return await super().submit(request, on_progress, on_preview)
            finally:
                self.error = None

    async def twice(worker: Grey) -> list[httpx2.Response]:
        async with client_of(app_of(worker)) as client:
            return [await streamed(client), await streamed(client)]

    first, second = asyncio.run(twice(Once(WorkerLost("it died"), fails_at=1)))

    assert told(first)[-1][0] == "error"
    assert [name for name, _ in told(second)][-2:] == ["image_generation.completed", "[DONE]"]


# What the log and the metrics say of it


@pytest.mark.parametrize(
    ("worker", "status"), [(Showing(), 200), (Showing(WorkerLost("it died"), fails_at=1), 503)]
)
def test_the_log_says_how_a_stream_ended(
    caplog: pytest.LogCaptureFixture, worker: Grey, status: int
) -> None:
    caplog.set_level("INFO", "carpool.access")

    stream(worker, partial_images=1)

    [line] = [one for one in caplog.records if one.name == "carpool.access"]
    assert vars(line)["status"] == status
