"""One answer per request: nothing of a body, a trailer or a refused head is parsed as a request.

Over real connections on loopback, to an application that keeps what it was asked.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from carpool.server.transport.http_protocol import MOST_HEAD_BYTES, StrictHTTPProtocol

HOST = b"host: localhost\r\n"
POST = b"POST /draw HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /last HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"


@dataclass
class Exchange:
    """What one connection brought about."""

    paths: list[str] = field(default_factory=list)  # of the requests that the application saw
    bodies: list[bytes] = field(default_factory=list)
    headers: list[list[tuple[bytes, bytes]]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # of the answers that the client got
    told: bytes = b""

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        body, is_whole = b"", scope["path"] == "/unread"
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            is_whole = not message.get("more_body")
        self.bodies.append(body)
        self.headers.append(scope["headers"])
        headers = [(b"content-length", b"%d" % len(body))]
        if scope["path"] == "/closing":
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Patient(StrictHTTPProtocol):
    head_timeout_s = body_timeout_s = 30.0


class Split(Patient):
    """What stands behind a blank line comes in a packet of its own."""

    def data_received(self, data: bytes) -> None:
        for piece in re.findall(rb".+?\r\n\r\n|.+", data, re.DOTALL):
            super().data_received(piece)


class Hasty(StrictHTTPProtocol):
    head_timeout_s = body_timeout_s = 0.1


def exchange(*pieces: bytes | None, wire: type[StrictHTTPProtocol] = Patient) -> Exchange:
    """Send these one after another, and read until the server closes, of itself and soon.

    None stands for reading an answer.
    """
    seen = Exchange()

    async def talk() -> None:
        config = Config(
            seen.application, interface="asgi3", ws="none", lifespan="off", log_config=None
        )
        config.load()
        protocol = partial(wire, config=config, server_state=ServerState(), app_state={})
        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            for piece in pieces:
                if piece is None:
                    head = await reader.readuntil(b"\r\n\r\n")
                    seen.told += head + await reader.readexactly(length_of(head))
                    continue
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(4):  # less than uvicorn waits for the next request
                while data := await reader.read(1 << 16):
                    seen.told += data
        except ConnectionError:  # it closed before all was sent
            pass
        finally:
            writer.close()
            server.close()

    asyncio.run(talk())
    rest = seen.told
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), seen.told
        if (status := int(head.split()[1])) != 100:
            seen.statuses.append(status)
            rest = rest[length_of(head) :]
    return seen


def length_of(head: bytes) -> int:
    return next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:"))  # fmt: skip


def every_byte(sent: bytes) -> list[bytes | None]:
    return [sent[i : i + 1] for i in range(len(sent))]


# Upgrades: HTTP/1.1 is all that is spoken, and a body stays a body


UPGRADES = {
    "unknown": b"connection: upgrade\r\nupgrade: foo\r\n",
    "websocket": b"connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    "h2c, as curl sends it": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "upgrade first": b"UPGRADE: x\r\nConnection: close,Upgrade,keep-alive\r\n",
    "twice": b"connection: upgrade\r\nupgrade: a\r\nupgrade: b\r\nconnection: upgrade\r\n",
    "empty": b"upgrade:\r\nconnection: upgrade\r\n",
}


@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
def test_the_body_of_an_upgrade_request_is_its_body(upgrade: bytes, is_split: bool) -> None:
    plain = POST + upgrade + b"content-length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN
    chunked = POST + upgrade + b"transfer-encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n" % len(HIDDEN) + HIDDEN + b"\r\n0\r\n\r\n"
    requests = [plain] if b"close" in upgrade else [plain, chunked, LAST]

    pieces = [[*(every_byte(sent) if is_split else [sent]), None] for sent in requests]
    got = exchange(*chain.from_iterable(pieces))

    expected = ["/draw"] if b"close" in upgrade else ["/draw", "/draw", "/last"]
    assert got.paths == expected
    assert got.bodies == [HIDDEN, HIDDEN, b""][: len(expected)]
    assert got.statuses == [200] * len(expected)


@pytest.mark.parametrize("target", [b"localhost:80", b"/draw", b"http://localhost/"])
@pytest.mark.parametrize("length", [b"", b"content-length: %d\r\n" % len(HIDDEN)])
def test_a_tunnel_is_refused_and_nothing_behind_it_is_read(target: bytes, length: bytes) -> None:
    got = exchange(b"CONNECT " + target + b" HTTP/1.1\r\n" + HOST + length + b"\r\n" + HIDDEN)

    assert (got.paths, got.statuses) == ([], [400])


# Trailers and chunk extensions


def test_a_trailer_is_never_a_header() -> None:
    trailers = b"authorization: Bearer x\r\nx-request-id: mine\r\nx-forwarded-proto: https\r\n"
    sent = CHUNKED + b"2\r\n{}\r\n0\r\n" + trailers + b"host: other\r\n\r\n"

    for pieces in ([sent], every_byte(sent)):
        got = exchange(*pieces, None, LAST)

        assert got.bodies == [b"{}", b""]
        assert got.headers[0] == [(b"host", b"localhost"), (b"transfer-encoding", b"chunked")]
        assert got.headers[1] == [(b"host", b"localhost"), (b"connection", b"close")]


ENDLESS = {
    "trailers": (b"0\r\n", b"a:\r\n"),
    "a trailer without an end": (b"0\r\na: ", b"b"),
    "a trailer's name": (b"0\r\n", b"b"),
    "an extension": (b"1;", b"x"),
    "an extension's value": (b"1;x=", b"y"),
    "an extension of every chunk": (b"", b"1;x=" + b"y" * 200 + b"\r\n{\r\n"),
    "zeros of a chunk size": (b"", b"0"),
}


@pytest.mark.parametrize(("first", "more"), ENDLESS.values(), ids=ENDLESS)
def test_what_a_chunked_body_has_beside_its_content_is_limited(first: bytes, more: bytes) -> None:
    endless = more * (2 * MOST_HEAD_BYTES // len(more) + 1)

    got = exchange(CHUNKED + first + endless[: len(endless) // 2], endless)

    assert got.bodies == []
    assert got.statuses in ([400], [])  # nothing, if the connection was reset meanwhile


def test_small_chunks_and_some_trailers_are_fine() -> None:
    chunks = b"1\r\n{\r\n" * 5000 + b"8;name=value\r\n12345678\r\n" * 500

    sent = CHUNKED + chunks + b"0;last\r\n" + b"x: y\r\n" * 100 + b"\r\n"
    got = exchange(sent, None, LAST)

    assert got.bodies == [b"{" * 5000 + b"12345678" * 500, b""]


def test_blank_lines_in_a_chunk_end_nothing() -> None:
    content = b"\r\n\r\n" * 300 + b"0\r\n\r\n" + HIDDEN
    sent = CHUNKED + b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n"

    for pieces in ([sent], every_byte(sent)):
        got = exchange(*pieces, None, LAST)

        assert (got.paths, got.bodies) == (["/draw", "/last"], [content, b""])


# Heads and bodies that two servers may understand in two ways


def post(*lines: bytes, body: bytes = b"") -> bytes:
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


ZERO = b"0\r\n\r\n"
AMBIGUOUS = {
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": post(b"host: localhost"),
    "two other hosts": post(b"Host: other"),
    "two hosts in one": b"GET / HTTP/1.1\r\nhost: a, b\r\n\r\n",
    "host with a path": b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n",
    "host with a user": b"GET / HTTP/1.1\r\nhost: u@a\r\n\r\n",
    "host with a port of letters": b"GET / HTTP/1.1\r\nhost: a:b\r\n\r\n",
    "two hosts in HTTP/1.0": b"GET / HTTP/1.0\r\n" + HOST * 2 + b"\r\n",
    "target of another host": b"GET http://other/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "target of a user": b"GET http://u@localhost/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "target without host": b"GET http:///x HTTP/1.1\r\n" + HOST + b"\r\n",
    "target of another scheme": b"GET ftp://localhost/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "target of no scheme": b"GET x HTTP/1.1\r\n" + HOST + b"\r\n",
    "CL.TE": post(b"content-length: 6", b"transfer-encoding: chunked", body=ZERO),
    "TE.CL": post(b"transfer-encoding: chunked", b"content-length: 3", body=ZERO),
    "TE in HTTP/1.0": b"POST / HTTP/1.0\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n" + ZERO,
    **{
        f"TE.TE {value!r}": post(b"transfer-encoding:" + value, body=ZERO)
        for value in (b"x, chunked", b",chunked", b"chunked, x", b"chunked, chunked", b"chunked,",
                      b"identity", b"gzip", b"", b"x", b"xchunked", b"chunkedx", b"\x0bchunked",
                      b'"chunked"', b"chunked;q=1", b"gzip\r\ntransfer-encoding: chunked",
                      b"chunked\r\ntransfer-encoding: gzip",
                      b"chunked\r\ntransfer-encoding: chunked", b"\r\n chunked",
                      b"x\r\n chunked")
    },
    **{
        f"CL {value!r}": post(b"content-length:" + value, body=b"123456")
        for value in (b"6\r\ncontent-length: 6", b"6\r\ncontent-length: 0", b"6, 6", b"6 6",
                      b"0\r\ncontent-length: 6", b"+6", b"-1", b"-0", b"0x6", b"6.0", b"6e0",
                      b"", b"\xb2", b"a", b"99999999999999999999", b"\r\n 6")
    },
    "bare LF": post(b"a: b\nc: d"),
    "bare LF before the end": POST + b"\n",
    "bare LF twice": b"GET / HTTP/1.1\nhost: localhost\n\n",
    "bare CR": post(b"a: b\rc: d"),
    "obs-fold": post(b"a: b", b" c: d"),
    "obs-fold at first": b"GET / HTTP/1.1\r\n " + HOST + b"\r\n",
    "control character in an upgrade": post(b"connection: upgrade", b"upgrade: \x0b"),
    "obs-fold of an upgrade": post(b"connection: upgrade", b"upgrade: a", b" b"),
    "space before a colon": post(b"transfer-encoding : chunked", body=ZERO),
    "tab before a colon": post(b"transfer-encoding\t: chunked", body=ZERO),
    "no colon": post(b"transfer-encoding chunked", body=ZERO),
    "no name": post(b": chunked", body=ZERO),
    "NUL in a name": post(b"a\0: b"),
    "NUL in a value": post(b"a: b\0"),
    "control character": post(b"a: b\x7f"),
    "not ASCII in a name": post(b"a\xff: b"),
    "space at the end": b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n",
    "fragment in the target": b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "tab in the target": b"GET /\t HTTP/1.1\r\n" + HOST + b"\r\n",
    "space first": b" GET / HTTP/1.1\r\n" + HOST + b"\r\n",
    "not ASCII in the target": b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    "small letters": b"get / HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\n" + HOST + b"\r\n",
    "NULs": b"\0" * 99,
    "HTTP/9.9": b"GET / HTTP/9.9\r\n\r\n",
    "a method alone": b"GET\r\n\r\n",
    "not ASCII in the method": b"G\xff / HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 99,
}  # fmt: skip


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_request_that_can_be_read_in_two_ways_is_refused_with_all_behind_it(sent: bytes) -> None:
    got = exchange(sent + HIDDEN + LAST)

    assert (got.paths, got.statuses) == ([], [400])
    error = json.loads(got.told.partition(b"\r\n\r\n")[2])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_http"
    assert b"\r\nx-request-id: req-" in got.told
    assert b"\r\nconnection: close\r\n" in got.told


CHUNKS = {
    "negative": b"-1\r\n{\r\n", "with a prefix": b"0x1\r\n{\r\n", "with a sign": b"+1\r\n{\r\n",
    "empty": b"\r\n{\r\n", "of letters": b"zz\r\n{\r\n", "too large": b"ffffffffffffffff1\r\n{\r\n",
    "of a space": b"1 \r\n{\r\n", "with a space first": b" 1\r\n{\r\n",
    "with a bare LF": b"1\n{\r\n", "with a bare CR": b"1\r{\r\n",
    "whose content is longer": b"1\r\n{}\r\n", "whose content ends with a bare LF": b"1\r\n{\n",
    "whose content has no end": b"1\r\n{0\r\n\r\n",
    "with a bare LF in its extension": b"1;a\nb\r\n{\r\n",
    "with a bare CR in its extension": b"1;a\rb\r\n{\r\n",
    "with NUL in its extension": b"1;\0\r\n{\r\n",
    "with a quoted line in its extension": b'1;a="\r\n"\r\n{\r\n',
    "that is the last, with a bare LF": b"0\n\n", "that is the last, then a bare LF": b"0\r\n\n",
    "whose trailer ends with a bare LF": b"0\r\na: b\n\r\n",
    "whose trailer is folded": b"0\r\na: b\r\n c\r\n\r\n",
    "whose trailer is none": b"0\r\nGET /hidden HTTP/1.1\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_a_chunk_that_can_be_read_in_two_ways_ends_the_connection(chunk: bytes) -> None:
    got = exchange(CHUNKED + b"1\r\n{\r\n" + chunk + ZERO + HIDDEN + LAST)

    assert (got.bodies, got.statuses) == ([], [400])
    assert b"invalid_http" in got.told


@pytest.mark.parametrize(
    "chunks", [b"A\r\n0123456789\r\n", b"a\r\n0123456789\r\n", b"00000a\r\n0123456789\r\n",
               b'a;x="y;z"\r\n0123456789\r\n', b"5;x\r\n01234\r\n5\r\n56789\r\n"],
)  # fmt: skip
def test_chunks_of_every_legal_form_are_read(chunks: bytes) -> None:
    got = exchange(CHUNKED + chunks + b"000\r\na: b\r\n\r\n", None, LAST)

    assert got.bodies == [b"0123456789", b""]


# Behind one request


BEHIND = [b"\0\0\0", b"GET / HTTP/1.1\r\n\r\n", POST + b"a : b\r\n\r\n", HIDDEN]


@pytest.mark.parametrize("behind", BEHIND)
def test_bytes_behind_a_request_do_not_touch_its_answer(behind: bytes) -> None:
    """In one packet with it they are not read: clients that send in advance have to repeat it."""
    got = exchange(HIDDEN + behind)

    assert (got.paths, got.statuses) == (["/hidden"], [200])


@pytest.mark.parametrize(
    ("behind", "paths"),
    [(LAST, ["/hidden", "/last"]), (b"\0" * 2 * MOST_HEAD_BYTES, ["/hidden"])],
    ids=["short", "long"],
)
def test_a_request_that_comes_before_the_answer_waits_for_it(
    behind: bytes, paths: list[str]
) -> None:
    got = exchange(HIDDEN + behind, wire=Split)

    assert (got.paths, got.statuses) == (paths, [200] * len(paths))


def test_nothing_behind_the_last_request_is_read() -> None:
    for last in (LAST, b"GET /last HTTP/1.0\r\n\r\n",
                 b"GET /last HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"):  # fmt: skip
        for pieces in ([last + HIDDEN], [last, HIDDEN], [last + b"\0\0"]):
            got = exchange(*pieces)

            assert (got.paths, got.statuses) == (["/last"], [200])


SEQUENCES = {
    "a head in parts": ([HIDDEN, None, LAST[:20], LAST[20:-1], LAST[-1:]], ["/hidden", "/last"]),
    "blank lines first": (
        [b"\r\n\r\n" + HIDDEN + b"\r\n", None, b"\r\n" + LAST],
        ["/hidden", "/last"],
    ),
    "a target with this host": (
        [b"GET http://LOCALHOST/hidden HTTP/1.1\r\n" + HOST + b"\r\n", None, LAST],
        ["/hidden", "/last"],
    ),
    "behind an answer that closes": (
        [HIDDEN.replace(b"/hidden", b"/closing") + HIDDEN],
        ["/closing"],
    ),
}


@pytest.mark.parametrize(("pieces", "paths"), SEQUENCES.values(), ids=SEQUENCES)
def test_requests_that_follow_one_another_are_read_as_they_are(
    pieces: list[bytes | None], paths: list[str]
) -> None:
    got = exchange(*pieces)

    assert (got.paths, got.statuses) == (paths, [200] * len(paths))


def test_a_connection_that_stays_idle_after_an_early_answer_is_closed() -> None:
    head = b"POST /unread HTTP/1.1\r\n" + HOST + b"content-length: 2\r\n\r\n"

    got = exchange(head, None, b"{}", wire=Hasty)  # {} ends uvicorn's own timer

    assert got.statuses == [200]


def test_a_body_that_comes_after_its_answer_may_come_with_the_next_request() -> None:
    head = b"POST /unread HTTP/1.1\r\n" + HOST + b"content-length: 2\r\n\r\n"

    got = exchange(head, None, b"{}" + LAST)

    assert (got.paths, got.statuses) == (["/unread", "/last"], [200, 200])
