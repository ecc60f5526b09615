"""A worker on another machine: who may talk to it, what is silent, who takes it over.

Both ends run here, over loopback; the worker's process is a fake.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carpool.config import EngineSettings
from carpool.fleet import handshake, host, packets
from carpool.fleet.packets import HEADER, PACKET_BYTES, Malformed, PacketStream
from carpool.fleet.remote_connection import RemoteConnection, WorkerAddress
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from support.fake_hosts import LOAD, READY, SECRET, Stage, staged, until


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other end closes."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def loaded(
    stage: Stage, process: int = 1
) -> tuple[RemoteConnection, AsyncIterator[protocol.ToFront]]:
    """A front that has its model loaded, by the first process or a later one."""
    front = await stage.front()
    await until(lambda: len(stage.children) == process)
    stage.children[-1].told.put_nowait(READY)
    messages = front.messages()
    assert await anext(messages) == READY
    return front, messages


async def test_both_ends_prove_that_they_know_the_secret_and_it_is_never_sent() -> None:
    async with staged() as stage:
        heard = bytearray()

        async def overhear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await stage.raw()

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while part := await source.read(1 << 16):
                    heard.extend(part)
                    sink.write(part)

            with contextlib.suppress(ConnectionError):
                await asyncio.gather(copy(reader, back), copy(there, writer))
            back.close()
            writer.close()

        between = await asyncio.start_server(overhear, "127.0.0.1", 0)
        port = between.sockets[0].getsockname()[1]
        connection = await RemoteConnection.open(WorkerAddress("127.0.0.1", port, SECRET))
        connection.send(LOAD)
        await until(lambda: bool(stage.children))
        assert len(heard) > 100
        assert SECRET not in heard
        assert SECRET[:8] not in heard
        await connection.close()
        await stage.host.close()
        between.close()


async def test_a_wrong_secret_is_refused_by_the_worker_and_no_process_starts() -> None:
    async with staged() as stage:
        with pytest.raises(ConnectionError):
            await stage.connect(bytes(32))
        assert not stage.children


async def test_a_worker_that_does_not_know_the_secret_gets_nothing_from_the_front() -> None:
    """What it has to send is not what it could have learned from the front."""

    async with staged():
        got = bytearray()

        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(handshake.MAGIC + bytes(32))
            said = await reader.readexactly(64)
            writer.write(said[32:])  # the front's own proof
            got.extend(await ended(reader))
            writer.close()

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match="does not know the fleet's secret"):
            await RemoteConnection.open(WorkerAddress("127.0.0.1", port, SECRET))
        assert not got
        server.close()


async def test_an_answer_that_was_overheard_proves_nothing_to_the_next_challenge() -> None:
    async with staged() as stage:
        reader, writer = await stage.raw()
        nonce = (await reader.readexactly(48))[16:]
        mine = bytes(32)
        answer = mine + handshake.proof(SECRET, b"front", nonce, mine)
        writer.write(answer)
        assert len(await reader.readexactly(32)) == 32  # it was good once
        writer.close()

        reader, writer = await stage.raw()
        await reader.readexactly(48)
        writer.write(answer)
        assert await ended(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(200), bytes(64), b"\xff" * 5000],
    ids=["http", "zeros", "much"],
)
async def test_garbage_is_refused_after_sixty_four_bytes(said: bytes) -> None:
    async with staged() as stage:
        reader, writer = await stage.raw()
        writer.write(said)
        assert len(await ended(reader)) in (0, 48)  # the challenge, or a reset
        writer.close()
        assert not stage.children


async def test_a_peer_that_says_nothing_is_let_go_and_keeps_no_front_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 0.2)

    async with staged() as stage:
        silent = [await stage.raw() for _ in range(36)]
        for reader, writer in silent:
            await ended(reader)
            writer.close()
        await loaded(stage)


async def test_a_packet_or_a_message_that_is_too_large_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packets, "MOST_MESSAGE_BYTES", 3 * PACKET_BYTES)

    async with staged() as stage:
        for sent in (
            HEADER.pack(packets.PART, PACKET_BYTES + 1) + bytes(PACKET_BYTES + 1),
            4 * (HEADER.pack(packets.PART, PACKET_BYTES) + bytes(PACKET_BYTES)),
            HEADER.pack(99, 0),
            HEADER.pack(packets.END, 3) + b"\xc1\xc1\xc1",
        ):
            reader, writer = await stage.raw()
            await handshake.introduce(reader, writer, SECRET)
            writer.write(sent)
            await ended(reader)
            writer.close()
        assert not stage.children
        await loaded(stage)


async def test_messages_of_all_sizes_arrive_in_order_and_whole() -> None:
    async with staged() as stage:
        front, messages = await loaded(stage)
        sizes = [0, 1, PACKET_BYTES - 1, PACKET_BYTES, PACKET_BYTES + 1, 5 * PACKET_BYTES]
        for size in sizes:
            front.send(protocol.Cancel("x" * size))
            stage.children[0].told.put_nowait(protocol.Started("y" * size))
        got = [await anext(messages) for _ in sizes]
        assert [len(one.request_id) for one in got if isinstance(one, protocol.Started)] == sizes
        await until(lambda: stage.children[0].of(protocol.Cancel) == len(sizes))
        sent = [one for one in stage.children[0].got if isinstance(one, protocol.Cancel)]
        assert [len(one.request_id) for one in sent] == sizes
        await front.close()


async def test_a_large_output_arrives_as_a_file_and_others_come_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MOST_INLINE_BYTES", 1000)

    async with staged() as stage:
        front = await stage.connect(spool=tmp_path)
        front.send(LOAD)
        await until(lambda: bool(stage.children))
        content = bytes(range(256)) * (80 * PACKET_BYTES // 256)
        clip = protocol.RawVideo(4, 4, 1, content)
        done = protocol.Done("a", 1, [], Timings(), protocol.TokenUsage(0, 0), clip)
        for message in (READY, done, protocol.Started("b")):
            stage.children[0].told.put_nowait(message)
        messages = front.messages()
        first, second, third = [await anext(messages) for _ in range(3)]
        assert (first, second) == (READY, protocol.Started("b"))
        assert isinstance(third, protocol.Done)
        assert third.clip is not None
        assert (bytes(third.clip.rgb), third.clip.path) == (content, b"")
        await front.close()
    assert os.listdir(tmp_path) == []


async def test_a_full_disk_fails_the_request_whose_output_it_was_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MOST_INLINE_BYTES", 1000)

    async with staged() as stage:
        front = await stage.connect(spool=tmp_path / "full")  # nothing can be written there
        front.send(LOAD)
        await until(lambda: bool(stage.children))
        content = bytes(range(256)) * (3 * PACKET_BYTES // 256)

        def drawn(name: str) -> protocol.Done:
            clip = protocol.RawVideo(4, 4, 1, content)
            return protocol.Done(name, 1, [], Timings(), protocol.TokenUsage(0, 0), clip)

        messages = front.messages()
        for message in (READY, drawn("a")):
            stage.children[0].told.put_nowait(message)
        assert await anext(messages) == READY
        failed = await anext(messages)
        assert isinstance(failed, protocol.RequestFailed)
        assert (failed.request_id, failed.error) == ("a", "StoreFailed")

        (tmp_path / "full").mkdir()  # there is room again
        stage.children[0].told.put_nowait(drawn("b"))
        answer = await anext(messages)
        assert isinstance(answer, protocol.Done)
        assert answer.clip is not None
        assert bytes(answer.clip.rgb) == content
        await front.close()


async def test_a_worker_cannot_name_a_file_of_the_front(tmp_path: Path) -> None:
    mine = tmp_path / "private"
    mine.write_bytes(b"secret")

    async with staged() as stage:
        front, messages = await loaded(stage)
        clip = protocol.RawVideo(1, 1, 1, b"", path=os.fsencode(mine))
        done = protocol.Done("a", 1, [], Timings(), protocol.TokenUsage(0, 0), clip)
        stage.children[0].told.put_nowait(done)
        assert [one async for one in messages] == []
        assert "a file that was not sent" in front.end
        assert mine.exists()
        await front.close()


async def test_what_is_silent_is_lost_at_the_second_look_and_not_after_a_stall_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(packets, "BEAT_S", 0.0)
    monkeypatch.setattr(PacketStream, "_now_s", staticmethod(lambda: now_s[0]))

    async with staged():
        heard = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await heard.wait()
            writer.write(HEADER.pack(packets.ALIVE, 0))
            heard.clear()
            await heard.wait()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        mine = PacketStream(*await asyncio.open_connection("127.0.0.1", port), silent_s=1.75)
        reading = asyncio.create_task(anext(mine.bodies(), b"the end"))
        now_s[0] = 1.7
        for _ in range(50):
            await asyncio.sleep(0)
        assert [mine.is_silent] == [False]
        heard.set()
        await until(lambda: mine._heard_s == 1.7)
        now_s[0] = 3.4
        for _ in range(50):
            await asyncio.sleep(0)
        assert [mine.is_silent] == [False]
        now_s[0] = 3.5
        assert await reading == b"the end"
        assert mine.is_silent
        heard.set()
        mine.close()
        server.close()


def test_a_silent_worker_is_acted_on_within_three_seconds_by_the_constants() -> None:

    assert packets.SILENT_S + packets.BEAT_S < 3.0
    assert packets.SILENT_S > 3 * packets.BEAT_S  # two lost signs of life are no death


async def test_a_front_that_comes_again_takes_over_what_is_loaded_once_requests_end() -> None:
    async with staged() as stage:
        front, _ = await loaded(stage)
        [child] = stage.children
        front.send(protocol.Submit(CheckedRequest("old", 1, {"prompt": "a cat"})))
        await until(lambda: child.of(protocol.Submit) == 1)
        await front.close()
        await until(lambda: child.of(protocol.Reset) == 1)

        again = await stage.front()
        child.told.put_nowait(protocol.Started("old"))  # is nothing to the new front
        child.told.put_nowait(protocol.RequestFailed("old", "Cancelled", "it was cancelled"))
        child.told.put_nowait(READY)
        messages = again.messages()
        assert await anext(messages) == READY
        child.told.put_nowait(protocol.Started("new"))
        assert await anext(messages) == protocol.Started("new")
        assert stage.children == [child]
        await again.close()


async def test_other_settings_or_a_process_that_ended_are_loaded_anew() -> None:
    async with staged() as stage:
        front, messages = await loaded(stage)
        stage.children[0].told.put_nowait(None)  # it dies
        assert [one async for one in messages] == []
        assert (front.end, front.is_lost) == ("it ended with exit code 7", False)
        await front.close()

        again, _ = await loaded(stage, process=2)
        await again.close()

        other = protocol.LoadModel("shapes", EngineSettings(max_running=3))
        third = await stage.front(other)
        await until(lambda: len(stage.children) == 3)
        assert stage.children[1].is_closed
        await third.close()


async def test_a_front_that_comes_while_the_model_loads_waits_for_the_same_process() -> None:
    async with staged() as stage:
        front = await stage.front()
        await until(lambda: bool(stage.children))
        await front.close()
        again, _ = await loaded(stage)
        assert len(stage.children) == 1
        await again.close()


async def test_a_second_front_is_refused_while_the_first_is_alive_and_may_try_again() -> None:
    async with staged() as stage:
        first, _ = await loaded(stage)
        second = await stage.front()
        assert [one async for one in second.messages()] == []
        assert "another front of the same fleet name" in second.end
        assert second.is_lost
        await second.close()
        await first.close()


async def test_the_front_has_a_process_killed_that_hangs() -> None:
    async with staged() as stage:
        front, messages = await loaded(stage)
        front.kill()
        assert [one async for one in messages] == []
        assert stage.children[0].is_killed
        await front.close()


async def test_requests_of_a_lost_front_that_do_not_end_cost_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "RESET_S", 0.01)

    async with staged() as stage:
        front, _ = await loaded(stage)
        await front.close()
        await until(lambda: stage.children[0].is_closed)
        assert stage.children[0].is_killed
        await loaded(stage, process=2)


async def test_a_worker_without_a_front_ends_and_one_with_a_front_does_not() -> None:
    async with staged(keep_s=0.1) as stage:
        front, _ = await loaded(stage)
        await asyncio.sleep(0.2)
        assert not stage.ended.is_set()
        await front.close()
        await stage.ended.wait()


async def test_a_message_that_breaks_the_protocol_is_no_message() -> None:
    async with staged() as stage:
        reader, writer = await stage.raw()
        await handshake.introduce(reader, writer, SECRET)
        mine = PacketStream(reader, writer, silent_s=9.0)
        with pytest.raises(Malformed, match="a file that was not sent"):
            mine.take_file()
        mine.close()
