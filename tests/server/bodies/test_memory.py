"""What requests hold before they are answered: asked of their key's limits first, and bounded."""

import asyncio
import io
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from starlette.types import Message

from carpool.errors import BodyTooLarge, CarpoolError, Overloaded, RateLimited
from carpool.server.access.limits import MemoryBudget, MemoryLease
from support.app import Grey, app_of, ask, client_of
from support.endpoints import EDITS, ENDPOINT, VARIATIONS
from support.forms import BOTH, send, worker_of
from support.pictures import png

WORK = (ENDPOINT, EDITS, VARIATIONS, "/v1/videos", "/v1/videos/video_1/remix")


# The budget


def hold(budget: MemoryBudget, key: str, *sizes: int) -> MemoryLease:
    """A request that never ends."""
    held = budget.open(key).__enter__()
    for size in sizes:
        held.take(size)
    return held


def test_a_key_holds_half_and_the_others_the_rest() -> None:
    budget = MemoryBudget(100)
    hold(budget, "a", 20, 20)

    with pytest.raises(RateLimited, match=r"API key 'a' hold 40 bytes: .* more than 50 "):
        hold(budget, "a", 11)
    hold(budget, "b", 50)
    with pytest.raises(Overloaded, match="other requests hold 90 bytes") as refused:
        hold(budget, "c", 11)

    assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", 1.0)


def test_without_keys_all_clients_share_the_whole() -> None:
    budget = MemoryBudget(100)
    hold(budget, "", 60)
    hold(budget, "", 40)

    with pytest.raises(Overloaded):
        hold(budget, "", 1)


def test_who_is_alone_may_hold_more_than_its_share_but_not_any_number() -> None:
    budget = MemoryBudget(100, alone=160)
    large = hold(budget, "a", 70, 90)

    with pytest.raises(RateLimited):
        hold(budget, "a", 1)
    with pytest.raises(BodyTooLarge, match=r"take more than 50 bytes .* or a smaller n"):
        large.take(1)
    large.give(160)
    hold(budget, "a", 1)


def test_what_a_request_holds_is_free_when_it_ends_however_it_does() -> None:
    budget = MemoryBudget(100)

    def fail() -> None:
        with budget.open("a") as held:
            held.take(40)
            held.replace(40, 30)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    hold(budget, "a", 50)
    hold(budget, "b", 50)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=60))
def test_no_order_of_requests_holds_more_than_the_budget(asked: list[tuple[str, int]]) -> None:
    budget, held = MemoryBudget(100), list[tuple[str, MemoryLease]]()
    for key, size in asked:
        held.append((key, hold(budget, key)))
        try:
            held[-1][1].take(size)
        except CarpoolError:
            _, oldest = held.pop(0)
            oldest.give(oldest.bytes)
        sizes = [one.bytes for _, one in held if one.bytes]
        assert sum(sizes) <= 100 or len(sizes) == 1
        for key in "abc":
            own = [one.bytes for of, one in held if of == key and one.bytes]
            assert sum(own) <= 50 or len(own) == 1


# Before the body


async def gone(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class Body:
    """A body whose last part never comes."""

    def __init__(self, *parts: bytes) -> None:
        self.parts, self.asked, self.is_parked = list(parts), 0, asyncio.Event()

    async def __call__(self) -> Message:
        self.asked += 1
        if not self.parts:
            self.is_parked.set()
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": True}


class Sender:
    """Sends requests to an application with jobs, as a server does."""

    def __init__(self, **settings: Any) -> None:
        self.app = app_of(worker_of(BOTH), **settings)

    def park(self, path: str, body: Body, **headers: str) -> "asyncio.Task[tuple[int, str]]":
        return asyncio.create_task(self.send(path, body, **headers))

    async def send(
        self, path: str, receive: Callable[[], Awaitable[Message]], **headers: str
    ) -> tuple[int, str]:
        """Status and text of the answer."""
        sent = {"content-type": "application/json", **headers}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "scheme": "http", "server": ("test", 80), "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }  # fmt: skip
        told = list[Message]()

        async def tell(message: Message) -> None:
            told.append(message)

        await self.app(scope, receive, tell)
        text = b"".join(one.get("body", b"") for one in told).decode()
        return told[0]["status"], text


@pytest.mark.parametrize("path", WORK)
async def test_of_parked_requests_as_many_are_let_in_as_may_be_unanswered(path: str) -> None:
    sender, bodies = Sender(max_in_flight_per_key=2), [Body() for _ in range(300)]
    parked = [sender.park(path, body) for body in bodies]
    for body in bodies[:2]:
        await body.is_parked.wait()

    for task in parked[2:]:
        assert (await task)[0] == 429
    assert [body.asked for body in bodies] == [1, 1] + [0] * 298

    await gone(*parked)
    again = Body()
    parked = [sender.park(path, again)]
    await again.is_parked.wait()
    await gone(*parked)


@pytest.mark.parametrize("path", WORK)
async def test_requests_a_minute_are_counted_before_a_body_is_read(path: str) -> None:
    sender, first, second = Sender(requests_per_minute=1), Body(), Body()
    parked = sender.park(path, first)
    await first.is_parked.wait()

    status, text = await sender.send(path, second)

    assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert second.asked == 0
    await gone(parked)


def test_a_wrong_key_and_a_wrong_method_are_told_so_without_a_place() -> None:
    for path in WORK[:3]:
        told = [
            ask(b"{}", path, api_key=("k",), max_in_flight_per_key=1, method=method).status_code
            for method in ("POST", "PUT")
        ]
        assert told == [401, 405]


FORM = {"content-type": "multipart/form-data; boundary=x"}
FIRST = b'--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n'


@pytest.mark.parametrize(
    ("path", "headers", "first"),
    [(ENDPOINT, {}, b""), (EDITS, {}, b""), (EDITS, FORM, FIRST)],
    ids=["generations", "edits", "form"],
)
async def test_bytes_of_bodies_are_bounded_together(
    path: str, headers: dict[str, str], first: bytes
) -> None:
    keys = {name: {"authorization": f"Bearer {name}", **headers} for name in "ab"}
    sender = Sender(api_key=("a", "b"), max_in_flight_bytes=1_000_000)
    bodies = [Body(first, bytes(120_000)) for _ in range(4)]
    parked = [sender.park(path, body, **keys["a"]) for body in bodies]
    for body in bodies:
        await body.is_parked.wait()

    status, text = await sender.send(path, Body(first, bytes(120_000)), **keys["a"])
    assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "hold 480" in text
    assert "more than 500000 (--max-in-flight-bytes)" in text

    other = Body(first, bytes(120_000))
    parked.append(sender.park(path, other, **keys["b"]))
    await other.is_parked.wait()
    await gone(*parked)


async def test_pictures_of_requests_that_wait_for_their_turn_are_counted_decoded() -> None:
    """A black one of a few thousand bytes becomes four million."""
    out = io.BytesIO()
    Image.new("RGB", (1024, 1024)).save(out, "PNG")
    form = httpx2.Request(
        "POST", "http://localhost", data={"prompt": "a"},
        files=[("image", ("a.png", out.getvalue()))],
    )  # fmt: skip
    headers = {"content-type": form.headers["content-type"], "authorization": "Bearer a"}
    content = form.read()

    worker = Grey(is_slow=True)
    worker.ready = worker_of(replace(BOTH, max_pixels=2048 * 2048)).ready
    app = app_of(worker, max_in_flight_bytes=10_000_000, api_key=("a",))
    async with client_of(app) as client:

        async def edit() -> httpx2.Response:
            return await client.post(EDITS, content=content, headers=headers)

        for _ in range(2):  # the first one's bytes are free when it has gone
            drawing = asyncio.create_task(edit())
            await worker.until(lambda: worker.running == 1)
            refused = await edit()
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "rate_limit_exceeded",
            )
            await gone(drawing)
            await worker.until(lambda: worker.running == 0)


@pytest.mark.parametrize(("n", "status"), [(1, 200), (2, 200), (3, 413)])
def test_every_output_counts_the_pictures_that_it_begins_with(n: int, status: int) -> None:
    content = png(256, 256)  # 262,144 bytes decoded, and 196,608 for each output
    worker = worker_of(replace(BOTH, max_pixels=256 * 256))
    settings = {"max_in_flight_bytes": 700_000, "max_upload_bytes": 300_000}

    answer = send([("image", content)], worker=worker, settings=settings, n=str(n))

    assert answer.status_code == status
    if status == 413:
        assert answer.json()["error"]["code"] == "body_too_large"


# The disk


def test_an_upload_that_finds_the_temporary_folder_full_is_told_so_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = png() + os.urandom(2 << 20)

    with monkeypatch.context() as patched:
        patched.setattr("tempfile.SpooledTemporaryFile.rollover", full)
        answer = send([("image", content)], worker=worker_of(BOTH))
        assert send([("image", png())], worker=worker_of(BOTH)).status_code == 200

    told = answer.json()["error"]
    assert (answer.status_code, told["code"]) == (503, "store_failed")
    assert told["message"] == (
        "the server has no room for uploads just now (No space left on device)"
    )
    assert answer.headers["x-should-retry"] == "true"
    assert send([("image", png())], worker=worker_of(BOTH)).status_code == 200


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device", "/tmp/secret")
