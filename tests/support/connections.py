"""Raw connections over loopback to the application as `carpool serve` puts it on the wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from uvicorn import Config
from uvicorn.server import ServerState

from carpool.server.transport.http_protocol import StrictHTTPProtocol
from support.app import Grey, app_of

ALIVE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Hasty(StrictHTTPProtocol):
    head_timeout_s = body_timeout_s = 0.15


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """Read one answer whole."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = head.partition("content-length: ")[2].partition("\r\n")[0]
        await self.reader.readexactly(int(length or 0))
        return int(head.split()[1])

    async def until_closed(self) -> bytes:
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""


class Wired:
    def __init__(self, port: int, worker: Grey, state: ServerState) -> None:
        self.port, self.worker, self.state = port, worker, state

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def check(self) -> None:
        """Somebody else is answered."""
        async with self.client() as other:
            await other.send(ALIVE)
            assert await other.status() == 200


@asynccontextmanager
async def wired(
    wire: type[StrictHTTPProtocol] = StrictHTTPProtocol, *, is_slow: bool = False, **settings: Any
) -> AsyncIterator[Wired]:
    worker, state = Grey(is_slow=is_slow), ServerState()
    config = Config(app_of(worker, **settings), ws="none", lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    protocol = partial(wire, config=config, server_state=state, app_state={})
    server = await loop.create_server(protocol, "127.0.0.1", 0)
    try:
        yield Wired(server.sockets[0].getsockname()[1], worker, state)
    finally:
        server.close()
