"""What a hostile picture server answers is parsed on a thread: the event loop goes on."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from carpool.errors import InvalidValue, RateLimited
from carpool.media import fetch_url
from carpool.media.executors import FairExecutor, on_this_loop, run_apart
from carpool.media.fetch_url import fetch
from carpool.media.reader import ImageIntake, PictureReader
from support.pictures import png

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n"


class Counted:
    """Counts bytes, on one thread alone, and refuses beyond a limit."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.thread, self.bytes, self.most = threading.get_ident(), 0, most

    def replace(self, old: int, new: int) -> None:
        assert threading.get_ident() == self.thread
        self.bytes += new - old
        if self.bytes > self.most:
            raise RateLimited("too much", retry_after_s=1)


async def picture_of(answer: bytes, held: Any = None) -> Any:
    """Open a picture from a server that answers so, as a request does."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def resolve(*_: Any) -> Sequence[str]:
        return ["127.0.0.1"]

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        intake = ImageIntake(PictureReader(allow_remote=True), "a", held or Counted())
        return await intake.open(f"http://127.0.0.1:{port}/a.png")
    finally:
        server.close()


@pytest.fixture
def parsed_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads on which answers were parsed; loopback is public here."""
    threads: list[int] = []

    async def noted(*args: Any, **options: Any) -> bytes:
        threads.append(threading.get_ident())
        return await fetch(*args, **options, is_allowed=lambda address: True)

    monkeypatch.setattr(fetch_url, "fetch", noted)
    return threads


def test_an_answer_is_parsed_on_another_thread_and_counted_on_this_one(
    parsed_on: list[int],
) -> None:
    held, file = Counted(), png()
    answer = HEAD + b"content-length: %d\r\n\r\n" % len(file) + file

    assert asyncio.run(picture_of(answer, held)).size == (64, 64)

    assert parsed_on != [threading.get_ident()]
    assert held.bytes == len(file)


def test_memory_that_a_picture_may_not_take_ends_its_download(parsed_on: list[int]) -> None:
    answer = HEAD + b"content-length: 1000000\r\n\r\n" + bytes(1_000_000)

    with pytest.raises(RateLimited):
        asyncio.run(picture_of(answer, Counted(100_000)))


@pytest.mark.parametrize(
    "answer",
    [HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000,
     HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"40\r\n" + b"x" * 64 + b"\r\n" * 9_000,
     b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20_000 + b"nonsense\r\n\r\n",
     b"HTTP/1.1 200 OK\r\n" + b"a:b\r\n" * 30_000],
    ids=["single bytes", "broken chunks", "hints", "headers"],
)  # fmt: skip
async def test_odd_answers_are_the_urls_fault_and_the_loop_turns_meanwhile(
    parsed_on: list[int], answer: bytes
) -> None:
    turns = 0
    opening = asyncio.create_task(picture_of(answer))
    while not opening.done():
        turns += 1
        await asyncio.sleep(0.001)
    with pytest.raises(InvalidValue, match="image: the URL"):
        await opening
    assert turns > 1
    assert threading.get_ident() not in parsed_on


def test_pieces_of_usual_sizes_are_taken_however_many_they_are(parsed_on: list[int]) -> None:
    file = png() + bytes(1_000_000)
    pieces = [file[at : at + 512] for at in range(0, len(file), 512)]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"

    answer = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked

    assert asyncio.run(picture_of(answer)).size == (64, 64)


async def test_work_on_another_loop_ends_with_its_caller() -> None:
    ended = threading.Event()

    executor = FairExecutor("test", 1, per_tenant=1)
    began = asyncio.Event()

    async def note() -> None:
        began.set()

    here = on_this_loop(note)

    async def work() -> None:
        try:
            await here()
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(run_apart(executor, "a", work))
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 10)
