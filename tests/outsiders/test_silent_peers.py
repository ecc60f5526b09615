"""Peers that connect to a Ray worker's host and prove nothing keep its front out at no address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from carpool.config import EngineSettings
from carpool.fleet import handshake
from carpool.fleet.host import PER_ADDRESS, WorkerHost
from carpool.fleet.remote_connection import RemoteConnection, WorkerAddress
from carpool.worker import protocol
from support.app import CARD
from support.fake_hosts import FakeChild, until

SECRET = bytes(range(32))
LIMIT = 4 * PER_ADDRESS
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Stage:
    """A host that gives peers all the time of the world to prove who they are."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.host = WorkerHost(SECRET, keep_s=1000.0, at_end=lambda: None, open_child=self._opened)
        self.port = 0
        self.peers: list[Peer] = []

    async def _opened(self, spool: Path) -> FakeChild:
        self.children.append(FakeChild())
        return self.children[-1]

    async def silent(self, count: int, address: str = "127.0.0.1", said: bytes = b"") -> list[Peer]:
        """Connections from an address of this machine, each as far as the host's challenge."""
        peers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.port, local_addr=(address, 0)
            )
            writer.write(said)
            await reader.readexactly(48)
            peers.append((reader, writer))
        self.peers += peers
        return peers

    async def front_is_served(self) -> None:
        """A front connects at once, and has its model loaded."""
        async with asyncio.timeout(5):
            front = await RemoteConnection.open(WorkerAddress("127.0.0.1", self.port, SECRET))
            front.send(protocol.LoadModel("shapes", EngineSettings()))
            await until(lambda: len(self.children) == 1)
            self.children[-1].told.put_nowait(protocol.WorkerReady(CARD, {}, 0.5))
            assert isinstance(await anext(front.messages()), protocol.WorkerReady)
            await front.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 1000.0)


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    stage = Stage()
    stage.port = await stage.host.listen("127.0.0.1")
    try:
        yield stage
    finally:
        for _, writer in stage.peers:
            writer.close()
        await stage.host.close()


async def is_closed(peer: Peer) -> bool:
    try:
        async with asyncio.timeout(0.05):
            return await peer[0].read() == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("said", [b"", b"\0", b"\0" * 63], ids=["silent", "a byte", "all but one"])
@pytest.mark.parametrize("count", [16, 100])
async def test_silent_peers_keep_no_front_of_their_own_address_out(
    patient: None, said: bytes, count: int
) -> None:
    async with staged() as stage:
        await stage.silent(count, said=said)
        await stage.front_is_served()


async def test_silent_peers_of_many_addresses_keep_no_front_out(patient: None) -> None:
    async with staged() as stage:
        for number in range(2, LIMIT + 10):
            await stage.silent(2, f"127.0.0.{number}")
        await stage.front_is_served()


async def test_one_address_takes_no_place_of_another_ones(patient: None) -> None:
    """The peer that was first stays, though its neighbour's would fill all places many times."""

    async with staged() as stage:
        [first] = await stage.silent(1, "127.0.0.2")
        crowd = await stage.silent(2 * LIMIT, "127.0.0.3")
        assert not await is_closed(first)
        assert await is_closed(crowd[0])
        open_ = [not await is_closed(peer) for peer in crowd[-PER_ADDRESS:]]
        assert open_ == [True] * PER_ADDRESS  # the newest
