"""Pictures of many clients: one that is slow, or gone, keeps nobody else waiting."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from carpool.errors import InvalidValue
from carpool.media import uploads
from carpool.media.reader import FETCHES, LOOKUPS, ImageIntake, PictureReader
from support.connections import wired
from support.endpoints import EDITS
from support.forms import BOTH, worker_of
from support.pictures import png


class Stuck:
    """A function that ends when it is told to, for those arguments that it is told of."""

    def __init__(self, own: Any, is_stuck: Any) -> None:
        self.own, self.is_stuck = own, is_stuck
        self.running, self.most, self.calls = 0, 0, 0
        self.may_end, self._lock = threading.Event(), threading.Lock()

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._lock:
            self.calls += 1
        if self.is_stuck(*args):
            with self._lock:
                self.running += 1
                self.most = max(self.most, self.running)
            assert self.may_end.wait(20)
            with self._lock:
                self.running -= 1
        return self.own(*args, **options)


@contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, is_stuck: Any) -> Iterator[Stuck]:
    found = Stuck(getattr(place, name), is_stuck)
    monkeypatch.setattr(place, name, found)
    try:
        yield found
    finally:
        found.may_end.set()


async def until(is_so: Any) -> None:
    for _ in range(5000):
        if is_so():
            return
        await asyncio.sleep(0.001)  # other threads run
    raise AssertionError("it never came about")


async def test_a_silent_name_server_takes_some_threads_for_names_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_silent(host: str, *_: Any) -> bool:
        return host.startswith("silent")

    reader = PictureReader(allow_remote=True)

    async def fetch(host: str, tenant: str) -> None:
        await ImageIntake(reader, tenant).open(f"http://{host}/a.png")

    with stuck(monkeypatch, socket, "getaddrinfo", is_silent) as names:
        waiting = [
            asyncio.create_task(fetch(f"silent{number}.example", "a")) for number in range(50)
        ]
        await until(lambda: names.running == LOOKUPS // 4)
        with pytest.raises(InvalidValue, match="not public"):
            await asyncio.wait_for(fetch("127.0.0.1", "b"), 5)
        for _ in range(9):  # asyncio's own executor is free
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 5) == 7
        assert names.most == LOOKUPS // 4
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert names.calls == LOOKUPS // 4 + 1  # who has left is not looked up


async def test_one_tenant_fetches_some_pictures_at_once_and_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetching: list[str] = []

    async def fetch(url: str, **_: Any) -> bytes:
        fetching.append(url)
        if "slow" in url:
            await asyncio.Event().wait()
        return png()

    monkeypatch.setattr("carpool.media.fetch_url.fetch", fetch)

    reader = PictureReader(allow_remote=True)
    slow = [
        asyncio.create_task(ImageIntake(reader, "a").open(f"http://slow/{number}"))
        for number in range(100)
    ]
    await until(lambda: len(fetching) == FETCHES // 4)

    assert (await ImageIntake(reader, "b").open("http://quick")).size == (64, 64)

    assert len(fetching) == FETCHES // 4 + 1
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_pictures_of_one_tenant_keep_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small = png(128, 128), png()

    reader = PictureReader()
    first, second = ImageIntake(reader, "a"), ImageIntake(reader, "b")
    with stuck(monkeypatch, uploads, "decode", lambda file: file.width == 128) as decoding:
        files = [await first.open(large) for _ in range(20)]
        waiting = [asyncio.create_task(first.decode(file)) for file in files]
        await until(lambda: decoding.running)

        file = await asyncio.wait_for(second.open(small), 5)
        assert (await asyncio.wait_for(second.decode(file), 5)).size == (64, 64)

        most = decoding.most
        decoding.may_end.set()
        for task in waiting:
            assert (await task).size == (128, 128)
        assert decoding.most <= max(most, 1) * 2


async def test_a_picture_whose_client_has_left_is_never_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small = png(128, 128), png()

    def sent(content: bytes) -> bytes:
        form = httpx2.Request(
            "POST",
            f"http://localhost{EDITS}",
            data={"prompt": "a"},
            files={"image": ("a.png", content)},
        )
        body = form.read()
        head = f"POST {EDITS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        return (head + f"content-type: {form.headers['content-type']}\r\n\r\n").encode() + body

    with stuck(monkeypatch, uploads, "decode", lambda file: file.width == 128) as decoding:
        async with wired() as server:
            server.worker.ready = worker_of(BOTH).ready
            async with server.client() as first:
                await first.send(sent(large))
                await until(lambda: decoding.running == 1)
                async with server.client() as second:
                    await second.send(sent(large))
                    await asyncio.sleep(0.05)
                async with server.client() as third:
                    await third.send(sent(small))
                    await asyncio.sleep(0.05)
                    decoding.may_end.set()
                    assert await third.status() == 200
                    assert await first.status() == 200
                    await server.check()
        assert decoding.calls == 2
