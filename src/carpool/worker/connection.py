"""A worker process and the socket to it, on the front's side.

Outputs that are too large for a message arrive as files in a spool folder. Each is mapped into
memory and unlinked as soon as its message arrives; files without a message are removed when their
worker ends. So no file is left, whichever side dies.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Protocol

from carpool.errors import StoreFailed, reason
from carpool.worker import encoding, protocol
from carpool.worker.start import Process, Start, spawn
from carpool.worker.watchdog import INTERVAL_S, LOADING_TIMEOUTS, Watchdog

log = logging.getLogger("carpool")
_EXIT_TIMEOUT_S = 2.0  # limit for a process to end once its socket is closed


class Connection(Protocol):
    """The front's end of a connection to a local or remote worker's process."""

    def send(self, message: protocol.ToWorker) -> None: ...
    def messages(self) -> AsyncIterator[protocol.ToFront]: ...
    def kill(self) -> None: ...
    @property
    def is_lost(self) -> bool:
        """Whether only the connection is known to have ended: the worker may be alive."""

    @property
    def is_explained(self) -> bool:
        """Whether a cause outside of the worker ended it; valid once `close` has returned."""

    @property
    def end(self) -> str: ...
    async def close(self) -> None: ...


class Connector(Protocol):
    """Connects to the process of one worker, and reconnects."""

    @property
    def is_remote(self) -> bool:
        """Whether to retry even the first failed `open`."""

    async def open(self) -> Connection: ...
    async def end(self) -> None:
        """End the worker permanently."""


async def watched(connection: Connection, limit_s: float) -> AsyncGenerator[protocol.ToFront, None]:
    """Yield a worker's messages until its end, and kill it if it hangs; see `watchdog`."""
    clock = asyncio.get_running_loop().time
    watchdog = Watchdog(LOADING_TIMEOUTS * limit_s, clock)
    watching = asyncio.create_task(_watch(connection, watchdog))
    try:
        async for message in connection.messages():
            if isinstance(message, protocol.WorkerReady):
                watching.cancel()
                watchdog = Watchdog(limit_s, clock)
                watching = asyncio.create_task(_watch(connection, watchdog))
            elif isinstance(message, protocol.Heartbeat):
                watchdog.receive(message)
            yield message
    finally:
        watching.cancel()


async def _watch(connection: Connection, watchdog: Watchdog) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        if watchdog.check():
            break
    log.error("the worker has done nothing for %.0f s: it is killed", watchdog.stalled_s)
    connection.kill()


class LocalConnector:
    """Starts processes on this machine; arguments as in `WorkerConnection.open`."""

    is_remote = False

    def __init__(self, spool: Path | None = None, start: Start = spawn) -> None:
        self._spool, self._start = spool, start

    async def open(self) -> Connection:
        return await WorkerConnection.open(self._spool, self._start)

    async def end(self) -> None:
        """Do nothing: its process ended with its connection."""


class WorkerConnection:
    """A worker process and its socket. `messages` ends when the worker ends, for any reason."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        spool: Path | None = None,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._spool, self._is_killed = spool, False

    @classmethod
    async def open(cls, spool: Path | None = None, start: Start = spawn) -> "WorkerConnection":
        """Start a process.

        Args:
            start: starts a worker that serves the other end of a socket.
            spool: the folder for the worker's large outputs.

        Raises:
            OSError: out of memory or file descriptors.
        """
        channel, peer = socket.socketpair()
        try:
            process = await start(peer)
        except BaseException:
            channel.close()
            raise
        finally:
            peer.close()
        return cls(process, *await asyncio.open_unix_connection(sock=channel), spool)

    def send(self, message: protocol.ToWorker) -> None:
        """Queue a message; messages arrive in order."""
        self._writer.write(encoding.encode(message))

    async def messages(self) -> AsyncIterator[protocol.ToFront]:
        """Yield the worker's messages until it closes the socket."""
        while True:
            try:
                header = await self._reader.readexactly(encoding.LENGTH.size)
                body = await self._reader.readexactly(encoding.LENGTH.unpack(header)[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            message = encoding.decode_to_front(body)
            yield mapped(message) if isinstance(message, protocol.Done) else message

    is_lost = False  # the socket ends with the process

    def kill(self) -> None:
        self._is_killed = True
        self._process.kill()

    @property
    def is_explained(self) -> bool:
        return self._process.has_lost_parent

    @property
    def end(self) -> str:
        """The reason for the process's end, for the log; valid once `close` has returned."""
        if self.is_explained:
            return "its fork server died"
        return describe_end(self._process.returncode, is_killed=self._is_killed)

    async def close(self) -> None:
        """Close the socket and wait for the process; kill it if it does not end by itself."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            with contextlib.suppress(TimeoutError):  # a stopped fork server sends no report
                await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT_S)
        with contextlib.suppress(OSError):  # such as a removed folder
            pattern = f"{self._process.pid}-*"  # other workers share the folder
            for path in self._spool.glob(pattern) if self._spool else ():
                path.unlink()


def describe_end(status: int | None, *, is_killed: bool = False) -> str:
    """Describe the end of a process.

    Args:
        status: its exit status; negative: the signal; None: unknown.
        is_killed: whether the front killed it.
    """
    if status is None or is_killed:
        return "it was killed, because it did not end by itself"
    if status >= 0:
        return f"it ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = "a real-time signal"
    hints: dict[int, str] = {
        signal.SIGKILL: ": killed, as the system does when memory runs out",
        signal.SIGSEGV: ": a library crashed",
        signal.SIGABRT: ": a library gave up",
        signal.SIGBUS: ": memory or a mapped file was not there",
    }
    return f"signal {-status}, {name}{hints.get(-status, '')}"


def mapped(answer: protocol.Done) -> protocol.Done | protocol.RequestFailed:
    """Map an output file into memory and unlink it; the last user frees it."""
    if answer.clip is None or not answer.clip.path:
        return answer
    path, answer.clip.path = Path(os.fsdecode(answer.clip.path)), b""
    try:
        with path.open("rb") as file:
            # used only as a buffer
            answer.clip.rgb = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # type: ignore[assignment]
    except OSError as error:
        log.error("an output could not be taken over: %s", error)
        problem = f"the output could not be taken over: {reason(error)}"
        return protocol.RequestFailed(answer.request_id, StoreFailed.__name__, problem)
    finally:
        path.unlink(missing_ok=True)
    return answer
