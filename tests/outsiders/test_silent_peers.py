"""Peers that connect to a Ray worker's host and prove nothing keep its front out at no address."""

import asyncio

import pytest

from carpool.fleet import handshake
from support.fake_hosts import READY, Stage, staged, until

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def silent(
    stage: Stage, count: int, address: str = "127.0.0.1", said: bytes = b""
) -> list[Peer]:
    """Connections from an address of this machine, each as far as the host's challenge."""
    peers = []
    for _ in range(count):
        reader, writer = await stage.raw(address)
        writer.write(said)
        await reader.readexactly(48)
        peers.append((reader, writer))
    return peers


async def front_is_served(stage: Stage) -> None:
    """A front connects at once, and has its model loaded."""
    async with asyncio.timeout(5):
        front = await stage.front()
        await until(lambda: len(stage.children) == 1)
        stage.children[-1].told.put_nowait(READY)
        assert await anext(front.messages()) == READY


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 1000.0)


@pytest.mark.parametrize("said", [b"", b"\0", b"\0" * 63], ids=["silent", "a byte", "all but one"])
@pytest.mark.parametrize("count", [16, 100])
async def test_silent_peers_keep_no_front_of_their_own_address_out(
    patient: None, said: bytes, count: int
) -> None:
    async with staged() as stage:
        await silent(stage, count, said=said)
        await front_is_served(stage)


async def test_silent_peers_of_many_addresses_keep_no_front_out(patient: None) -> None:
    async with staged() as stage:
        for number in range(2, 42):
            await silent(stage, 2, f"127.0.0.{number}")
        await front_is_served(stage)
