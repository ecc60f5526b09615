"""Clients that are slow, endless or gone: they are hung up on, and nobody else notices.

Over real connections on loopback, to the application as `carpool serve` puts it on the wire.
"""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from carpool.server.transport.http_protocol import MOST_HEAD_BYTES
from support.connections import ALIVE, Hasty, wired
from support.endpoints import ENDPOINT

BODY = json.dumps({"prompt": "a red circle"}).encode()
HEAD = f"POST {ENDPOINT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


FORM = (
    b"POST /v1/images/edits HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n"
    b"content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\ncontent-disposition: form-data; "
)


# Slow


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", b"\r\n\r\n", HEAD, HEAD + b"x: y", b"POST / HTTP/1.1\r\nx: " + b"a" * 999,
     HEAD + b"content-length: 9\r\n\r\n", HEAD + b"content-length: 9\r\n\r\n{",
     HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{", ALIVE[:-2],
     HEAD + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n"],
    ids=lambda sent: f"{sent[-20:]!r}",
)  # fmt: skip
async def test_a_request_that_does_not_go_on_is_hung_up_on(sent: bytes) -> None:
    async with wired(Hasty) as server, server.client() as slow:
        await slow.send(sent)
        await server.check()
        assert b" 200 " not in await slow.until_closed()
        assert server.worker.jobs == []


async def test_a_head_that_drips_is_hung_up_on_although_it_goes_on() -> None:
    async with wired(Hasty) as server, server.client() as slow:
        await slow.send(HEAD)
        is_closed = False
        while not is_closed:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await slow.send(b"x: y\r\n")
                async with asyncio.timeout(0.02):
                    await slow.until_closed()
            is_closed = slow.reader.at_eof() or slow.reader.exception() is not None


async def test_a_second_request_that_drips_is_hung_up_on_too() -> None:
    async with wired(Hasty) as server, server.client() as slow:
        await slow.send(ALIVE)
        assert await slow.status() == 200
        await slow.send(b"\r\n\r\nGET /li")
        assert await slow.until_closed() == b""


async def test_work_takes_as_long_as_it_takes() -> None:
    async with wired(Hasty, is_slow=True) as server, server.client() as patient:
        await patient.send(WHOLE)
        await server.worker.until(lambda: server.worker.running == 1)
        await patient.send(b"GET /li")  # the next request has begun meanwhile
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await patient.until_closed()
        assert server.worker.running == 1


# Endless


@pytest.mark.parametrize(
    "pieces",
    [[b"GET /", *[b"a" * 50_000] * 3], [HEAD, *[b"x: y\r\n" * 5000] * 4],
     [HEAD, b"x: ", *[b"a" * 50_000] * 3], [HEAD, *[b"a" * 50_000] * 3],
     [HEAD, *[f"x{i}: y\r\n".encode() * 1000 for i in range(100)]]],
    ids=["path", "headers", "header", "name", "hundred thousand headers"],
)  # fmt: skip
async def test_a_head_without_end_is_refused(pieces: list[bytes]) -> None:
    assert MOST_HEAD_BYTES < 100_000

    async with wired() as server, server.client() as endless:
        try:
            for piece in pieces:
                await endless.send(piece)
                await server.check()
        except ConnectionError:
            return  # hung up on already
        told = await endless.until_closed()  # nothing, if it was hung up on meanwhile
        assert not told or told.startswith(b"HTTP/1.1 400 ")
        assert server.worker.jobs == []


async def test_a_large_body_is_not_taken_for_a_head() -> None:
    large = BODY + b" " * 800_000
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(large) + large

    async with wired() as server, server.client() as client:
        for request in (whole, ALIVE, whole):
            await client.send(request)
            assert await client.status() == 200


async def test_a_body_without_end_is_refused() -> None:
    async with wired(max_body_bytes=100_000) as server, server.client() as endless:
        await endless.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(200):
                await endless.send(b"1000\r\n" + b" " * 4096 + b"\r\n")
        except ConnectionError:
            return
        assert await endless.status() == 413


async def test_a_websocket_is_not_spoken_nor_worth_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    upgrade = (
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
    )

    async with wired() as server, server.client() as client:
        await client.send(upgrade)
        assert (await client.status()) == 200
    assert [one.message for one in caplog.records if one.levelname != "INFO"] == []


async def test_expecting_to_continue_is_answered() -> None:
    async with wired() as server, server.client() as client:
        head, blank, content = WHOLE.partition(b"\r\n\r\n")
        await client.send(head + b"\r\nexpect: 100-continue" + blank)
        told = await client.reader.readuntil(b"\r\n\r\n")
        await client.send(content)
        assert await client.status() == 200
        assert told.startswith(b"HTTP/1.1 100 ")


@pytest.mark.parametrize(
    ("key", "length", "status"), [("wrong", 20, 401), ("right", 2000, 413), ("wrong", 2000, 401)]
)
async def test_who_expects_to_continue_is_refused_before_a_body_is_sent(
    key: str, length: int, status: int
) -> None:
    more = f"authorization: Bearer {key}\r\nexpect: 100-continue\r\ncontent-length: {length}"

    settings: Any = {"api_key": ("right",), "max_body_bytes": 1000}
    async with wired(**settings) as server, server.client() as client:
        await client.send(HEAD + more.encode() + b"\r\n\r\n")
        assert (await client.until_closed()).startswith(b"HTTP/1.1 %d " % status)


# Gone


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
async def test_a_client_that_leaves_before_it_has_said_all_starts_nothing(share: float) -> None:
    async with wired() as server:
        async with server.client() as leaving:
            await leaving.send(WHOLE[: int(len(WHOLE) * share)])
        await server.check()
        assert server.worker.jobs == []


BEHIND = {
    "nothing": [WHOLE],
    "at once": [WHOLE + ALIVE],
    "later": [WHOLE, ALIVE],
    "more work": [WHOLE, WHOLE],
    "a large body": [WHOLE, HEAD + b"content-length: 90000\r\n\r\n" + b" " * 80_000],
}


@pytest.mark.parametrize("pieces", BEHIND.values(), ids=BEHIND)
async def test_work_ends_when_its_client_is_gone_whatever_it_sent_in_advance(
    pieces: list[bytes],
) -> None:
    async with wired(is_slow=True) as server:
        async with server.client() as leaving:
            for piece in pieces:
                leaving.writer.write(piece)
                await server.worker.until(lambda: server.worker.running == 1)
            await server.check()
        await server.worker.until(lambda: server.worker.running == 0)
        await server.check()
        assert len(server.worker.jobs) == 1


@pytest.mark.parametrize("sent", [WHOLE[:-5], FORM], ids=["JSON", "form"])
async def test_who_leaves_while_uploading_is_logged_as_gone_and_nothing_failed(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "carpool")

    def statuses() -> list[int]:
        return [vars(one)["status"] for one in caplog.records if "status" in vars(one)]

    async with wired() as server:
        async with server.client() as leaving:
            await leaving.send(sent)
            await server.check()
        async with asyncio.timeout(10):
            while not statuses():
                await server.check()

    assert statuses() == [499]
    assert [one.message for one in caplog.records if one.levelname != "INFO"] == []


async def test_many_idle_connections_keep_nobody_out() -> None:
    async with wired(Hasty) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(300)]
        await server.check()
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
        assert len(server.state.connections) <= 1  # that of the check may still end
