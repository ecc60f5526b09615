"""A worker's process behind a host, without a process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from carpool.config import EngineSettings
from carpool.fleet.host import WorkerHost
from carpool.fleet.remote_connection import RemoteConnection, WorkerAddress
from carpool.worker import protocol
from support.app import CARD


class FakeChild:
    """A worker's process: says what it is told to, and notes what it gets."""

    end, is_lost, is_explained = "it ended with exit code 7", False, False

    def __init__(self) -> None:
        self.got: list[protocol.ToWorker] = []
        self.told: asyncio.Queue[protocol.ToFront | None] = asyncio.Queue()
        self.is_killed = self.is_closed = False

    def send(self, message: protocol.ToWorker) -> None:
        self.got.append(message)

    async def messages(self) -> AsyncIterator[protocol.ToFront]:
        while (message := await self.told.get()) is not None:
            yield message

    def kill(self) -> None:
        self.is_killed = True
        self.told.put_nowait(None)

    async def close(self) -> None:
        self.is_closed = True
        self.told.put_nowait(None)

    def of(self, kind: type) -> int:
        return sum(isinstance(one, kind) for one in self.got)


async def settle() -> None:
    """Let every task come as far as it can."""
    for _ in range(30):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    """Turn the event loop until something is so."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


SECRET = bytes(range(32))
LOAD = protocol.LoadModel("shapes", EngineSettings())
READY = protocol.WorkerReady(CARD, {}, 0.5)


class Stage:
    """A host on loopback, and the fake processes that it has started."""

    def __init__(self, keep_s: float = 1000.0) -> None:
        self.children: list[FakeChild] = []
        self.fronts: list[RemoteConnection] = []
        self.ended = asyncio.Event()
        self.host = WorkerHost(
            SECRET, keep_s=keep_s, at_end=self.ended.set, open_child=self._opened
        )
        self.port = 0
        self.peers: list[asyncio.StreamWriter] = []

    async def _opened(self, spool: Path) -> FakeChild:
        self.children.append(FakeChild())
        return self.children[-1]

    async def connect(self, secret: bytes = SECRET, spool: Path | None = None) -> RemoteConnection:
        address = WorkerAddress("127.0.0.1", self.port, secret)
        self.fronts.append(await RemoteConnection.open(address, spool))
        return self.fronts[-1]

    async def front(self, load: protocol.LoadModel = LOAD) -> RemoteConnection:
        connection = await self.connect()
        connection.send(load)
        return connection

    async def raw(
        self, address: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A peer at an address of this machine that has not proved anything."""
        peer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self.peers.append(peer[1])
        return peer


@contextlib.asynccontextmanager
async def staged(**options: float) -> AsyncIterator[Stage]:
    stage = Stage(**options)
    stage.port = await stage.host.listen("127.0.0.1")
    try:
        yield stage
    finally:
        for front in stage.fronts:
            await front.close()
        for peer in stage.peers:
            peer.close()
        await stage.host.close()
