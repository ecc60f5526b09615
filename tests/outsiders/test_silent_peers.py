"""Peers that connect to a Ray worker's host and prove nothing keep its front out at no address."""

import asyncio

import pytest

from carpool.fleet import handshake
from carpool.fleet.host import PER_ADDRESS
from support.fake_hosts import READY, Stage, staged, until

LIMIT = 4 * PER_ADDRESS
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
        await silent(stage, count, said=said)
        await front_is_served(stage)


async def test_silent_peers_of_many_addresses_keep_no_front_out(patient: None) -> None:
    async with staged() as stage:
        for number in range(2, LIMIT + 10):
            await silent(stage, 2, f"127.0.0.{number}")
        await front_is_served(stage)


async def test_one_address_takes_no_place_of_another_ones(patient: None) -> None:
    """The peer that was first stays, though its neighbour's would fill all places many times."""

    async with staged() as stage:
        [first] = await silent(stage, 1, "127.0.0.2")
        crowd = await silent(stage, 2 * LIMIT, "127.0.0.3")
        assert not await is_closed(first)
        assert await is_closed(crowd[0])
        open_ = [not await is_closed(peer) for peer in crowd[-PER_ADDRESS:]]
        assert open_ == [True] * PER_ADDRESS  # the newest
