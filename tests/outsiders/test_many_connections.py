"""New connections are accepted however many are busy; without descriptors the server is quiet."""

import asyncio
import errno
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from carpool.config import ServeSettings
from carpool.fleet import handshake
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.server.access.keys import Keyring
from carpool.server.draining import DrainingServer
from carpool.server.transport.listening import ACCEPTED, ListeningSocket, listen_on
from carpool.telemetry.tracing import Tracing
from support.app import Grey, fleet_of
from support.connections import ALIVE
from support.fake_hosts import READY, Stage, staged, until

CROWD = 375
WORK = b"POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[DrainingServer]:
    """The HTTP server of `carpool serve` in this process, before a fake worker."""
    worker, store = Grey(), JobStore(None)
    chosen = ServeSettings(port=0, **settings)
    runner = Runner(store, worker, {}, model=lambda: "grey", max_running=1)
    server = DrainingServer(fleet_of(worker), chosen, runner, Keyring(chosen.api_key), Tracing())
    running = asyncio.create_task(server.serve())
    await server.is_up.wait()
    try:
        yield server
    finally:
        server.should_exit = True
        await running
        await runner.stop()
        store.close()


def connected(stack: ExitStack, address: Any, sent: bytes) -> socket.socket:
    """A connection that the kernel has made, whether or not it is accepted yet."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    one = stack.enter_context(socket.socket(family))
    one.connect(address)
    one.sendall(sent)
    one.setblocking(False)
    return one


async def turns_until_answered(client: socket.socket) -> int:
    """How many turns of the event loop it takes."""
    loop, turns = asyncio.get_running_loop(), 0
    answer = asyncio.create_task(loop.sock_recv(client, 4096))
    while not answer.done():
        turns += 1
        await asyncio.sleep(0)
    assert answer.result().startswith(b"HTTP/1.1 200 ")
    return turns


@pytest.mark.parametrize("kind", ["port", "socket"])
@pytest.mark.parametrize("crowd", [b"", b"POST", WORK], ids=["silent", "slow", "without a key"])
async def test_a_new_connection_waits_for_a_few_turns_behind_a_crowd(
    kind: str, crowd: bytes, tmp_path: Path
) -> None:
    path = str(tmp_path / "socket")

    uds = {"uds": path} if kind == "socket" else {}
    async with serving(api_key=("a-key",), **uds) as server:
        address = path if uds else ("127.0.0.1", server.port())
        with ExitStack() as clients:
            for _ in range(CROWD):
                connected(clients, address, crowd)
            turns = await turns_until_answered(connected(clients, address, ALIVE))

    assert turns < 40  # accepting, reading, and the turns that an answer itself takes


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Let this process open none beyond those that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as next_one:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno() + 1, hard))
    held = []
    try:
        while True:
            try:
                held.append(socket.socket())
            except OSError:
                break
        yield
    finally:
        for one in held:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_one_failure_is_told_and_others_do_not_try_again() -> None:
    with ExitStack() as stack:
        [listening] = listen_on("127.0.0.1", 0)
        stack.enter_context(listening)
        for _ in range(3):
            connected(stack, listening.getsockname(), b"")
        with no_descriptors_left():
            with pytest.raises(OSError, match="Too many open files") as first:
                listening.accept()
            for _ in range(ACCEPTED):
                with pytest.raises(BlockingIOError):
                    listening.accept()
        assert first.value.errno == errno.EMFILE
        listening._resumes_s = 0.0  # half a second later
        for _ in range(3):
            listening.accept()[0].close()


def test_all_addresses_of_a_host_are_listened_on_as_asyncio_does() -> None:
    several = listen_on("localhost", 0)
    try:
        assert {one.getsockname()[0] for one in several} <= {"127.0.0.1", "::1"}
        assert all(isinstance(one, ListeningSocket) for one in several)
    finally:
        for one in several:
            one.close()


def test_a_taken_port_leaves_no_socket_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as refused:
            listen_on("127.0.0.1", port)
    assert refused.value.errno == errno.EADDRINUSE


# Peers that connect to a Ray worker's host and prove nothing keep its front out at no address


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
