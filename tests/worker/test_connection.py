"""Large outputs on their way from a worker: files that nobody can forget."""

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from carpool.types import Timings
from carpool.worker import encoding, protocol
from carpool.worker.connection import WorkerConnection
from support.server_process import eventually

CONTENT = bytes(range(48))


def done(path: Path | str) -> protocol.Done:
    """A clip of one frame, 4 x 4, that lies in a file."""
    clip = protocol.RawVideo(4, 4, 1, b"", path=os.fsencode(path))
    return protocol.Done("one", 1, [], Timings(), protocol.TokenUsage(0, 0), clip)


async def received(
    spool: Path, *said: protocol.ToFront, begun: str | None = None
) -> list[protocol.ToFront]:
    """What the front hears of a worker that says this, hangs up and ends.

    Args:
        begun: a file that it writes, named after it.
    """
    ours, theirs = socket.socketpair()
    process: Any = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    if begun is not None:
        (spool / f"{process.pid}-{begun}").write_bytes(CONTENT)
    connection = WorkerConnection(process, *await asyncio.open_unix_connection(sock=ours), spool)
    with theirs:
        theirs.sendall(b"".join(map(encoding.encode, said)))
    told = [frame async for frame in connection.messages()]
    await connection.close()
    return told


def test_a_large_output_has_no_name_once_its_message_arrives(tmp_path: Path) -> None:
    (tmp_path / "film").write_bytes(CONTENT)

    [told] = asyncio.run(received(tmp_path, done(tmp_path / "film")))

    assert isinstance(told, protocol.Done)
    assert told.clip is not None
    assert (bytes(told.clip.rgb), told.clip.path) == (CONTENT, b"")
    assert not [*tmp_path.iterdir()]


def test_what_a_worker_began_to_write_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "1-other").write_bytes(CONTENT)  # another worker's

    assert asyncio.run(received(tmp_path, begun="half")) == []

    assert [path.name for path in tmp_path.iterdir()] == ["1-other"]


def test_an_output_that_cannot_be_read_fails_its_request_only(tmp_path: Path) -> None:
    told = asyncio.run(received(tmp_path, done(tmp_path / "nothing"), protocol.Started("two")))

    [failed, other] = told
    assert isinstance(failed, protocol.RequestFailed)
    assert (failed.request_id, failed.error) == ("one", "StoreFailed")
    assert "No such file" in failed.message
    assert other == protocol.Started("two")


def test_a_folder_that_is_gone_does_not_matter_to_the_end(tmp_path: Path) -> None:
    assert asyncio.run(received(tmp_path / "gone")) == []


def test_a_worker_does_not_inherit_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_API_KEY", "a-secret")
    monkeypatch.setenv("CARPOOL_API_KEY_FILE", "/a-secret")
    monkeypatch.setenv("CARPOOL_MAX_QUEUE", "7")

    async def worker() -> bytes:
        connection = await WorkerConnection.open()
        try:
            pid = connection._process.pid
            eventually(lambda: bool(environ_of(pid)), 10.0, "the process runs its program")
            return environ_of(pid)
        finally:
            connection.kill()
            await connection.close()

    told = asyncio.run(worker())

    assert b"CARPOOL_MAX_QUEUE=7" in told
    assert b"a-secret" not in told


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()
