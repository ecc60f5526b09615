"""The host of a worker's process for remote fronts: listens, and keeps the model loaded.

A front connects and sends the model to load. If an earlier front had loaded the same model, the
answer comes at once. A second front is refused while the first is alive. When a front leaves, its
requests are cancelled; after `keep_s` without a front, the worker ends.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from carpool.fleet import handshake
from carpool.fleet.packets import SILENT_S, Malformed, PacketStream
from carpool.worker import encoding, protocol
from carpool.worker.connection import Connection, WorkerConnection

log = logging.getLogger("carpool")

RESET_S = 60.0  # limit for ending a lost front's requests; then a kill


class WorkerHost:
    """Listens for fronts, and hosts one worker's process.

    Args:
        secret: the fleet's secret.
        keep_s: seconds without a front before `at_end` is called.
        tls: the context of this end.
        open_child: starts a process that stores large outputs in a folder.
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
        self._stream: PacketStream | None = None  # the front's connection
        self._is_attached = False  # the front has sent the model to load
        self._child: Connection | None = None
        self._loaded = b""  # the child's load message
        self._ready: protocol.WorkerReady | None = None
        self._is_resetting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.TimerHandle | None = None

    async def listen(self, host: str) -> int:
        """Start to listen; returns the port."""
        limit_s = handshake.CONNECT_S if self._tls else None
        self._server = await asyncio.start_server(
            self._accept, host, 0, ssl=self._tls, ssl_handshake_timeout=limit_s
        )
        self._left()
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """End the process, and stop listening."""
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

    # Front connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(handshake.CONNECT_S):  # silent peers keep no front out
                await handshake.welcome(reader, writer, self._secret)
        except (handshake.Refused, asyncio.IncompleteReadError, OSError) as error:  # or a timeout
            log.warning("a connection was refused: %s", error or "authentication timed out")
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
        except (Malformed, encoding.Undecodable) as error:
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
            message = encoding.decode_to_worker(body)
            if isinstance(message, protocol.LoadModel):
                await self._load(message, stream)
            elif self._child is not None and self._is_attached:
                self._child.send(message)

    async def _load(self, message: protocol.LoadModel, stream: PacketStream) -> None:
        """Answer at once if the model is loaded, else load it."""
        message.spool = os.fsencode(self._spool)
        # this flag does not affect the loaded model
        is_restart, message.is_restart = message.is_restart, False
        content = encoding.encode(message)
        message.is_restart = is_restart
        if self._child is None or self._loaded != content:
            await self._end_child()
            try:
                child = self._child = await self._open_child(self._spool)
            except OSError as error:  # out of memory or file descriptors
                await stream.say_farewell(f"its process cannot be started: {error}")
                return
            self._loaded, self._ready, self._is_resetting = content, None, False
            child.send(message)
            self._begin(self._pump(child))
        elif self._ready is not None and not self._is_resetting:
            await stream.send(encoding.encode_body(self._ready))
        self._is_attached = True

    # The worker's process

    async def _pump(self, child: Connection) -> None:
        """Forward the process's messages until it ends."""
        async for message in child.messages():
            if isinstance(message, protocol.WorkerReady):
                self._ready, self._is_resetting = message, False
            elif isinstance(message, protocol.LoadFailure):
                self._loaded = b""  # the next front triggers a retry
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
            await stream.send(encoding.encode_body(message))
            return
        content, clip.rgb, clip.path = clip.rgb, b"", b"sent before"
        self._begin(stream.send_file(content, encoding.encode_body(message)))

    def _reset(self) -> None:
        """Cancel the requests of a lost front."""
        if self._child is not None and self._ready is not None and not self._is_resetting:
            self._is_resetting = True
            self._child.send(protocol.Reset())
            self._begin(self._watch_reset(self._child))

    async def _watch_reset(self, child: Connection) -> None:
        await asyncio.sleep(RESET_S)
        if self._is_resetting and self._child is child:
            log.error("the requests of a lost front do not end: the process is killed")
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
