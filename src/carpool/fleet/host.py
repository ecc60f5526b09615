"""The host of a worker's process for fronts on other machines: listens, and keeps the model loaded.

A front connects and says what to load. If an earlier front had the same model loaded, the answer
comes at once. A second front is refused while the first is alive. When a front goes, its requests
are cancelled; when none came for `keep_s`, the worker ends.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from carpool.fleet import handshake
from carpool.fleet.packets import SILENT_S, Malformed, PacketStream
from carpool.worker import protocol
from carpool.worker.connection import Connection, WorkerConnection

log = logging.getLogger("carpool")

PER_ADDRESS = 8  # unproven connections; four times as many in all
RESET_S = 60.0  # limit for ending the requests of a lost front; then a kill


class UnprovenConnections:
    """Connections that have not proven yet that they know the fleet's secret: few, the newest.

    A front proves it in milliseconds. A peer that proves nothing keeps its place until newer ones
    need it, so silent peers keep no front out, whatever address it has: the address with the most
    of them loses its oldest.
    """

    def __init__(self) -> None:
        self._addresses: dict[asyncio.StreamWriter, str] = {}  # oldest first

    @contextlib.contextmanager
    def hold(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Count a connection for the block; another one may have it closed meanwhile."""
        peer = writer.get_extra_info("peername")  # None where it has gone already
        address = str(peer[0]) if peer else ""
        counts = Counter(self._addresses.values())
        if counts[address] >= PER_ADDRESS:
            self._close_oldest(address)
        elif len(self._addresses) >= 4 * PER_ADDRESS:
            self._close_oldest(max(counts, key=lambda address: counts[address]))
        self._addresses[writer] = address
        try:
            yield
        finally:
            self._addresses.pop(writer, None)

    def _close_oldest(self, address: str) -> None:
        first = next(writer for writer, of in self._addresses.items() if of == address)
        del self._addresses[first]
        first.transport.abort()


class WorkerHost:
    """Listens for fronts, and keeps one worker's process.

    Args:
        secret: of the fleet.
        keep_s: without a front, until `at_end` is called.
        tls: of this end.
        open_child: starts a process that puts large outputs into a folder.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        keep_s: float,
        at_end: Callable[[], None],
        tls: ssl.SSLContext | None = None,
        open_child: Callable[[Path], Awaitable[Connection]] = WorkerConnection.open,
    ) -> None:
        self._secret, self._keep_s, self._at_end, self._tls = secret, keep_s, at_end, tls
        self._open_child = open_child
        self._spool = Path(tempfile.mkdtemp(prefix="carpool-worker-"))
        self._server: asyncio.Server | None = None
        self._unproven = UnprovenConnections()
        self._stream: PacketStream | None = None  # to the front
        self._is_attached = False  # it has said what to load
        self._child: Connection | None = None
        self._loaded = b""  # what the child was told to load
        self._ready: protocol.WorkerReady | None = None
        self._is_resetting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.TimerHandle | None = None

    async def listen(self, host: str) -> int:
        """Begin to listen; returns the port."""
        limit_s = handshake.CONNECT_S if self._tls else None
        self._server = await asyncio.start_server(
            self._accept, host, 0, ssl=self._tls, ssl_handshake_timeout=limit_s
        )
        self._left()
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """End the process, and listen no more."""
        if self._server is not None:
            self._server.close()
        if self._leaving is not None:
            self._leaving.cancel()
        if self._stream is not None:
            self._stream.close()
        await self._end_child()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._spool, ignore_errors=True)

    # Fronts

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(handshake.CONNECT_S):
                with self._unproven.hold(writer):
                    await handshake.welcome(reader, writer, self._secret)
        except (handshake.Refused, asyncio.IncompleteReadError, OSError) as error:  # or in no time
            log.warning("a connection was refused: %s", error or "it proved nothing in time")
            writer.close()
            return
        stream = PacketStream(reader, writer, silent_s=2 * SILENT_S)
        if self._stream is not None:
            why = "it serves another front of the same fleet name, which is alive"
            await stream.say_farewell(why, refused=True)
            return
        self._stream = stream
        if self._leaving is not None:
            self._leaving.cancel()
        try:
            await self._serve(stream)
        except (Malformed, protocol.Undecodable) as error:
            log.error("the front broke the protocol: %s", error)
        finally:
            stream.close()
            self._stream, self._is_attached = None, False
            self._reset()
            self._left()

    def _left(self) -> None:
        self._leaving = asyncio.get_running_loop().call_later(self._keep_s, self._at_end)

    async def _serve(self, stream: PacketStream) -> None:
        async for body in stream.bodies():
            if body is None:
                if self._child is not None:
                    self._child.kill()
                continue
            message = protocol.decode_to_worker(body)
            if isinstance(message, protocol.LoadModel):
                await self._load(message, stream)
            elif self._child is not None and self._is_attached:
                self._child.send(message)

    async def _load(self, message: protocol.LoadModel, stream: PacketStream) -> None:
        """Answer from what is loaded, or load."""
        message.spool = os.fsencode(self._spool)
        # whether it is a restart says nothing of what is loaded
        is_restart, message.is_restart = message.is_restart, False
        content = protocol.encode(message)
        message.is_restart = is_restart
        if self._child is None or self._loaded != content:
            await self._end_child()
            try:
                child = self._child = await self._open_child(self._spool)
            except OSError as error:  # no memory or file descriptors left just now
                await stream.say_farewell(f"its process cannot be started: {error}")
                return
            self._loaded, self._ready, self._is_resetting = content, None, False
            child.send(message)
            self._begin(self._pump(child))
        elif self._ready is not None and not self._is_resetting:
            await stream.send(protocol.encode_body(self._ready))
        self._is_attached = True

    # The process

    async def _pump(self, child: Connection) -> None:
        """Pass on the process's messages until it ends."""
        async for message in child.messages():
            if isinstance(message, protocol.WorkerReady):
                self._ready, self._is_resetting = message, False
            elif isinstance(message, protocol.LoadFailure):
                self._loaded = b""  # the next front has it tried again
            elif isinstance(message, protocol.Reloaded) and self._ready is not None:
                self._ready.card = message.card
            if self._stream is not None and self._is_attached and not self._is_resetting:
                await self._pass(message, self._stream)
        await child.close()
        if self._child is child:
            self._child, self._loaded, self._ready = None, b"", None
            self._is_resetting = False
            if self._stream is not None and self._is_attached:
                await self._stream.say_farewell(child.end)

    async def _pass(self, message: protocol.ToFront, stream: PacketStream) -> None:
        clip = message.clip if isinstance(message, protocol.Done) else None
        if clip is None or len(clip.rgb) <= protocol.MOST_INLINE_BYTES:
            await stream.send(protocol.encode_body(message))
            return
        content, clip.rgb, clip.path = clip.rgb, b"", b"sent before"
        self._begin(stream.send_file(content, protocol.encode_body(message)))

    def _reset(self) -> None:
        """Have the requests of a front that is gone cancelled."""
        if self._child is not None and self._ready is not None and not self._is_resetting:
            self._is_resetting = True
            self._child.send(protocol.Reset())
            self._begin(self._watch_reset(self._child))

    async def _watch_reset(self, child: Connection) -> None:
        await asyncio.sleep(RESET_S)
        if self._is_resetting and self._child is child:
            log.error("the requests of a front that is gone do not end: the process is killed")
            child.kill()

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        self._loaded, self._ready, self._is_resetting = b"", None, False
        if child is not None:
            await child.close()

    def _begin(self, running: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                log.error("a worker's host failed: %r", error)
                if self._stream is not None:
                    self._stream.close()
