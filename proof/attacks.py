"""Attacks of a hostile client: one function for each attack, limited in count and time.

usage: python -m proof.attacks NAME URL [--key KEY]     (`hostile.py` does it)

An attack is prepared first, so the preparation is not measured: the process prints `ready` and
waits for a line on standard input. At the end it prints JSON with the answers, and the answers that
are wrong.
"""

import argparse
import asyncio
import base64
import io
import json
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
from PIL import Image

SECONDS = 8.0  # longest duration of an attack
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
MIB = 1 << 20


@dataclass(slots=True)
class Attacker:
    """A hostile client, and its observations."""

    url: str
    key: str = ""
    http: httpx2.AsyncClient = field(  # shared, because making a client takes time
        default_factory=lambda: httpx2.AsyncClient(
            timeout=SECONDS + 20,
            trust_env=False,
            verify=False,
            limits=httpx2.Limits(max_connections=None),
        )
    )
    answers: Counter[str] = field(default_factory=Counter)  # by status, or other outcome
    wrong: list[str] = field(default_factory=list)  # forbidden answers

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def note(self, name: str, status: object, *allowed: int) -> None:
        """Count an answer; it is wrong if it is a server error or not allowed."""
        self.answers[f"{name}: {status}"] += 1
        number = status if isinstance(status, int) else 0
        if (allowed and number not in allowed) or (number >= 500 and number not in (503, 507)):
            self.wrong.append(f"{name} was answered {status}")

    async def post(self, path: str, name: str, *allowed: int, **options: Any) -> int:
        """Send one request; returns the status, 0 if the connection was closed."""
        headers = {**self.headers, **options.pop("headers", {})}
        try:
            answer = await self.http.post(self.url + path, headers=headers, **options)
        except httpx2.TransportError:
            self.note(name, "closed")
            return 0
        self.note(name, answer.status_code, *allowed)
        return answer.status_code

    async def raw(self, data: bytes, *, wait_s: float = 1.0) -> bytes:
        """Send bytes on a new connection; returns the received bytes until silence."""
        reply = b""
        async with self.connected() as (reader, writer):
            writer.write(data)
            await writer.drain()
            while piece := await asyncio.wait_for(reader.read(1 << 16), wait_s):
                reply += piece
        return reply

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A new connection. A timeout, or a server that closes it, ends the block."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            yield reader, writer
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()

    def head(self, path: str = GENERATIONS, *lines: str, method: str = "POST") -> bytes:
        """The head of a request with further header lines."""
        auth = [f"authorization: Bearer {self.key}"] if self.key else []
        all_lines = [f"{method} {path} HTTP/1.1", f"host: {self.host}", *auth, *lines, "", ""]
        return "\r\n".join(all_lines).encode()


Attack = Callable[[Attacker], Awaitable[None]]
"""A prepared attack; runs when awaited."""

ATTACKS: dict[str, Callable[[], Attack]] = {}
BROWSER: dict[str, Callable[[], Attack]] = {}
"""Attacks that matter only on servers without keys."""


def attack(make: Callable[[], Attack]) -> Callable[[], Attack]:
    ATTACKS[make.__name__] = make
    return make


def from_a_page(make: Callable[[], Attack]) -> Callable[[], Attack]:
    BROWSER[make.__name__] = make
    return make


async def _together(jobs: Iterator[Awaitable[object]], at_once: int) -> None:
    """Run jobs with limited concurrency, until all are done or the time is over."""
    end_s = time.monotonic() + SECONDS

    async def work() -> None:
        for job in jobs:
            await job
            if time.monotonic() > end_s:
                return

    await asyncio.gather(*(work() for _ in range(at_once)))


def _answers(reply: bytes) -> int:
    return reply.count(b"HTTP/1.1 ")


# Framing

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: inside\r\n\r\n"


@attack
def requests_in_bodies() -> Attack:
    """Bodies that contain a request, with every header that could make a server parse it."""
    size = f"content-length: {len(SMUGGLED)}"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    cases: dict[str, tuple[tuple[str, ...], bytes]] = {
        "upgrade": (("connection: Upgrade", "upgrade: foo", size), SMUGGLED),
        "h2c": (("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk",
                 size), SMUGGLED),
        "websocket": (("connection: keep-alive, Upgrade", "upgrade: websocket", size), SMUGGLED),
        "upgrade, chunked": (("connection: Upgrade", "upgrade: foo", "transfer-encoding: chunked"),
                             chunked),
        "both lengths": ((size, "transfer-encoding: chunked"), b"0\r\n\r\n" + SMUGGLED),
        "two lengths": ((size, "content-length: 0"), SMUGGLED),
        "list of lengths": ((f"content-length: 0, {len(SMUGGLED)}",), SMUGGLED),
        "unknown coding": (("transfer-encoding: x, chunked",), b"0\r\n\r\n" + SMUGGLED),
        "coding twice": (("transfer-encoding: chunked", "transfer-encoding: identity"),
                         b"0\r\n\r\n" + SMUGGLED),
        "folded": (("transfer-encoding:\r\n chunked", size), b"0\r\n\r\n" + SMUGGLED),
        "space before colon": (("transfer-encoding : chunked", size), b"0\r\n\r\n" + SMUGGLED),
        "bad chunk size": (("transfer-encoding: chunked",), b"-1\r\n" + SMUGGLED),
        "huge chunk size": (("transfer-encoding: chunked",), b"fffffffffffffffff\r\n" + SMUGGLED),
        "two hosts": (("host: inside", size), SMUGGLED),
    }  # fmt: skip

    async def run(me: Attacker) -> None:
        for name, (lines, body) in cases.items():
            reply = await me.raw(me.head(GENERATIONS, "content-type: application/json", *lines)
                                 + body)  # fmt: skip
            me.answers[f"{name}: {_answers(reply)} answers"] += 1
            if _answers(reply) > 1 or b'"object":"list"' in reply:
                me.wrong.append(f"{name}: the body was read as a request")

    return run


@attack
def endless_trailers() -> Attack:
    """Endless lines after a chunked body, and trailers with names of headers."""
    lines = b"a: b\r\n" * 200_000

    async def flood(me: Attacker) -> None:
        head = me.head(GENERATIONS, "transfer-encoding: chunked", "content-type: application/json")
        count = 0
        async with me.connected() as (_, writer):
            writer.write(head + b"2\r\n{}\r\n0\r\n")
            for _ in range(48):  # 55 MB
                writer.write(lines)
                await writer.drain()
                count += len(lines)
        me.answers[f"trailers: {count >> 20} MiB went in"] += 1
        if count > 8 * MIB:
            me.wrong.append(f"trailers of {count >> 20} MiB were taken")

    async def run(me: Attacker) -> None:
        await asyncio.gather(*(flood(me) for _ in range(3)))
        wrong_key = Attacker(me.url, "wrong" if me.key else "")
        body = b'{"prompt": "a", "num_inference_steps": 1}'
        data = (
            wrong_key.head(GENERATIONS, "transfer-encoding: chunked",
                           "content-type: application/json")
            + b"%x\r\n%s\r\n0\r\nauthorization: Bearer %s\r\nx-request-id: trailer\r\n\r\n"
            % (len(body), body, me.key.encode())
        )  # fmt: skip
        reply = await me.raw(data, wait_s=5.0)
        if (me.key and b" 401 " not in reply[:16]) or b"x-request-id: trailer" in reply:
            me.wrong.append("a trailer counts as a header")

    return run


@attack
def heads_that_never_end() -> Attack:
    """Hundreds of connections that send a byte a second, and some with endless headers."""

    async def run(me: Attacker) -> None:
        end_s = time.monotonic() + SECONDS / 2

        async def slow() -> None:
            async with me.connected() as (_, writer):
                writer.write(b"POST / HTTP/1.1\r\n")
                while time.monotonic() < end_s:
                    writer.write(b"a: b\r\n")
                    await asyncio.sleep(1)

        async def fat() -> None:
            reply = await me.raw(me.head() + b"a: b\r\n" * 100_000)
            me.answers[f"fat head: {reply[9:12].decode() or 'closed'}"] += 1

        await asyncio.gather(*(slow() for _ in range(300)), *(fat() for _ in range(5)))

    return run


# Bodies


@attack
def json_of_millions_of_values() -> Attack:
    """JSON with as many values, keys, digits, or levels as fit into the largest body."""
    size = 60 * MIB
    bodies = {
        "objects": b'{"images":[' + b"{}," * (size // 3) + b"{}]}",
        "numbers": b'{"prompt": "a", "x": [' + b"1," * (size // 2) + b"1]}",
        "one number": b'{"prompt": "a", "seed": ' + b"1" * size + b"}",
        "escapes": b'{"prompt": "' + b"\\u0041" * (size // 6) + b'"}',
        "depth": b"[" * size,
        "keys": ("{" + ",".join(f'"k{i}":0' for i in range(4_000_000)) + "}").encode()[:size],
    }

    async def run(me: Attacker) -> None:
        headers = {"content-type": "application/json"}
        jobs = (
            me.post(path, f"{name} at {path}", 400, 413, 429, 422, content=body, headers=headers)
            for path in (EDITS, "/v1/videos", GENERATIONS)
            for name, body in bodies.items()
        )
        await _together(jobs, 2)

    return run


@attack
def bodies_that_are_parked() -> Attack:
    """Three hundred bodies whose last byte never arrives."""
    body = b'{"prompt": "' + b"x" * (MIB - 100)

    async def run(me: Attacker) -> None:
        head = me.head(GENERATIONS, f"content-length: {MIB - 1}", "content-type: application/json")

        async def park() -> None:
            async with me.connected() as (_, writer):
                writer.write(head + body)
                await asyncio.wait_for(writer.drain(), SECONDS)
                await asyncio.sleep(SECONDS / 2)

        await asyncio.gather(*(park() for _ in range(300)))

    return run


@attack
def long_texts() -> Attack:
    """Megabytes in every text of a request, up to ten times the limit."""
    long_fields = dict.fromkeys(("prompt_2", "negative_prompt", "user"), "x" * (MIB // 8))
    emoji = "".join(chr(0x1F600 + i % 80) for i in range(32_000))

    async def run(me: Attacker) -> None:
        draw = {"prompt": "a", "num_inference_steps": 1}
        jobs = [
            me.post(GENERATIONS, name, 400, 429, json=draw | {name: text})
            for name, text in long_fields.items()
            for _ in range(5)
        ]
        jobs += [
            me.post(GENERATIONS, "32,000 characters", json=draw | {"prompt": emoji, "n": 4})
            for _ in range(6)
        ]
        await _together(iter(jobs), 4)

    return run


# Pictures


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(side_px: int, depth: int, colour: int, channels: int, *chunks: bytes) -> bytes:
    """A PNG of zeros."""
    row = bytes(1 + side_px * channels * depth // 8)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(row) for _ in range(side_px)) + packer.flush()
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", side_px, side_px, depth, colour, 0, 0, 0))
    end = _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + end


def _jpeg(fill_bytes: int) -> bytes:
    """A JPEG with fill bytes before a marker, as the standard allows."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG")
    whole = buffer.getvalue()
    return whole[:2] + b"\xff" * fill_bytes + whole[2:]


def bombs() -> Mapping[str, bytes]:
    """Small pictures that are expensive to decode."""
    small = io.BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "x" * 60_000
    Image.new("RGB", (64, 64)).save(small, "JPEG", exif=exif)
    zeros = zlib.compress(bytes(64 * MIB), 9)
    return {
        "16-bit PNG": _png(5656, 16, 0, 1),
        "16-bit RGBA PNG": _png(2828, 16, 6, 4),
        "JPEG of fill bytes": _jpeg(20 * MIB),
        "PNG of chunks": _png(64, 8, 2, 3, *[_chunk(b"tEXt", b"a\0b")] * 1_000_000),
        "PNG of packed text": _png(64, 8, 2, 3, *[_chunk(b"zTXt", b"a\0\0" + zeros)] * 20),
        "PNG of a packed profile": _png(64, 8, 2, 3, _chunk(b"iCCP", b"a\0\0" + zeros)),
        "EXIF": small.getvalue(),
    }


@attack
def pictures_that_cost() -> Attack:
    """Small files that decode to large or slow pictures, several at once, as files and in JSON."""
    files = bombs()

    async def run(me: Attacker) -> None:
        draw = {"prompt": "a", "num_inference_steps": "1"}
        jobs = (
            me.post(EDITS, name, data=draw, files={"image": ("a", file)})
            for _ in range(6)
            for name, file in files.items()
        )
        await _together(jobs, 8)

    return run


@attack
def pictures_of_clients_that_leave() -> Attack:
    """Two hundred edits whose clients disconnect right after sending."""
    file = base64.b64encode(_png(2828, 16, 6, 4)).decode()
    url = f"data:image/png;base64,{file}"
    body = json.dumps({"prompt": "a", "images": [{"image_url": url}]}).encode()

    async def run(me: Attacker) -> None:
        head = me.head(EDITS, f"content-length: {len(body)}", "content-type: application/json")

        async def leave() -> None:
            async with me.connected() as (_, writer):
                writer.write(head + body)
                await asyncio.wait_for(writer.drain(), SECONDS)

        await _together((leave() for _ in range(200)), 20)

    return run


@attack
def requests_without_a_key() -> Attack:
    """A flood of requests without a key to all paths that need one."""

    async def run(me: Attacker) -> None:
        stranger = Attacker(me.url, "wrong", me.http, me.answers, me.wrong)
        jobs = (stranger.post(GENERATIONS, "wrong key", 401, json={"prompt": "a"})
                for _ in range(2000))  # fmt: skip
        await _together(jobs, 8)

    return run


# Pages of other origins, on servers without keys

FOREIGN: dict[str, dict[str, str]] = {
    "origin": {"origin": "https://evil.example"},
    "null origin": {"origin": "null"},
    "cross-site": {"sec-fetch-site": "cross-site"},
    "other port": {"origin": "http://127.0.0.1:1"},
    "rebound name": {"host": "evil.example"},
    "rebound name and origin": {"host": "evil.example", "origin": "http://evil.example"},
}


@from_a_page
def pages_of_other_origins() -> Attack:
    """Requests that a page can send without CORS preflight, and after DNS rebinding."""
    body = json.dumps({"prompt": "a", "num_inference_steps": 1})

    async def run(me: Attacker) -> None:
        for name, headers in FOREIGN.items():
            for kind in ("application/json", "text/plain"):
                fields = {**headers, "content-type": kind}
                allowed = 400, 403, 415
                title = f"{name}, {kind}"
                await me.post(GENERATIONS, title, *allowed, content=body, headers=fields)
            form = {"data": {"prompt": "a"}, "files": {"image": ("a", b"a")}}
            await me.post(EDITS, f"{name}, a form", 400, 403, headers=headers, **form)
            await me.post("/v1/jobs/x/cancel", f"{name}, cancel", 403, headers=headers)
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            await me.post(GENERATIONS, f"JSON as {kind}", 400, 415,
                          content=body, headers={"content-type": kind})  # fmt: skip
        rebound = await me.raw(b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\n\r\n")
        if b" 200 " in rebound[:16]:
            me.wrong.append("a name that is not the server's reads answers")

    return run


async def _main(name: str, attacker: Attacker) -> None:
    attack_ = {**ATTACKS, **BROWSER}[name]()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await attack_(attacker)
    print(json.dumps({"answers": attacker.answers, "wrong": attacker.wrong}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[*ATTACKS, *BROWSER])
    parser.add_argument("url")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    asyncio.run(_main(options.name, Attacker(options.url, options.key)))


if __name__ == "__main__":
    main()
