"""Messages between a front and a worker on another machine, cut into packets of one stream.

Packets keep a connection active while a large message is in transit: an end that was silent for
longer than `silent_s` counts as lost. Outputs that are too large for a message are sent as a file,
between the packets of other messages.
"""

import asyncio
import contextlib
import os
import struct
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

HEADER = struct.Struct(">BI")  # kind, number of following bytes
PACKET_BYTES = 64 << 10
MOST_MESSAGE_BYTES = 1 << 30
MOST_FILE_BYTES = 64 << 30
BEAT_S = 0.5  # between keep-alives; the other end's are checked twice as often
SILENT_S = 1.75  # timeout for a worker; with two checks, its requests move after 2.25 s

ALIVE, PART, END, FILE, KILL, ENDED, REFUSED = range(7)
"""Kinds of packets: keep-alive; part of a message; its last part; part of a file; kill the worker's
process; that process has ended (with the reason); the front is refused (with the reason)."""


class Malformed(Exception):
    """The other end violates the protocol."""


class PacketStream:
    """One end of the stream.

    Args:
        silent_s: max silence before the other end counts as lost.
        spool: folder for received files; None: the system's default.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        silent_s: float,
        spool: Path | None = None,
    ) -> None:
        self._reader, self._writer, self._spool = reader, writer, spool
        self._silent_s, self._heard_s = silent_s, self._now_s()
        self._was_silent = False  # at the last check
        self._file: IO[bytes] | None = None  # file being received
        self._path = Path()  # its path
        self._file_bytes = 0
        self._unkept: OSError | None = None  # error while storing the received file
        self._sending = asyncio.Lock()  # one file at a time
        self.is_silent = False  # closed because the other end was silent
        self.farewell = ""  # reason of the other end for closing
        self.is_refused = False  # the other end refused this one
        self._beating = asyncio.create_task(self._beat())

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    async def _beat(self) -> None:
        """Send keep-alives, and close the stream when the other end is silent.

        It takes two silent checks: after a stall of this process, received packets are unread.
        """
        beat_s = 0.0
        while True:
            if (now_s := self._now_s()) >= beat_s:
                self._packet(ALIVE, b"")
                beat_s = now_s + BEAT_S
            await asyncio.sleep(BEAT_S / 2)
            is_silent = self._now_s() - self._heard_s > self._silent_s
            if is_silent and self._was_silent:
                break
            self._was_silent = is_silent
        self.is_silent = True
        self._writer.transport.abort()

    # Sending

    def _packet(self, kind: int, part: bytes | memoryview) -> None:
        if not self._writer.is_closing():
            self._writer.write(HEADER.pack(kind, len(part)))
            if part:
                self._writer.write(part)

    def put(self, body: bytes) -> None:
        """Queue a message; messages arrive in order."""
        view = memoryview(body)
        for begin in range(0, len(body) - PACKET_BYTES, PACKET_BYTES):
            self._packet(PART, view[begin : begin + PACKET_BYTES])
        last = (len(body) - 1) // PACKET_BYTES * PACKET_BYTES if body else 0
        self._packet(END, view[last:])

    async def send(self, body: bytes) -> None:
        """Like `put`, but waits while the other end is slow."""
        self.put(body)
        await self._drained()

    async def send_file(self, content: bytes | memoryview, body: bytes) -> None:
        """Send a file, then its message; other messages may be sent in between."""
        async with self._sending:
            view = memoryview(content)
            for begin in range(0, len(view), PACKET_BYTES):
                self._packet(FILE, view[begin : begin + PACKET_BYTES])
                await self._drained()
            await self.send(body)

    async def _drained(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader reports it
            await self._writer.drain()

    def kill(self) -> None:
        """Ask the other end to kill the worker's process."""
        self._packet(KILL, b"")

    async def say_farewell(self, why: str, *, refused: bool = False) -> None:
        """Send the reason and close."""
        self._packet(REFUSED if refused else ENDED, why.encode()[:PACKET_BYTES])
        await self._drained()
        self.close()

    def close(self) -> None:
        self._beating.cancel()
        self._drop_file()
        self._writer.close()

    # Receiving

    async def bodies(self) -> AsyncIterator[bytes | None]:
        """Yield messages until the stream ends; None: a request to kill the worker's process.

        Raises:
            Malformed: the other end violates the protocol.
        """
        parts = bytearray()
        while True:
            try:
                kind, size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > PACKET_BYTES:
                    raise Malformed(f"a packet of {size} bytes: the limit is {PACKET_BYTES}")
                part = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return
            self._heard_s = self._now_s()
            if kind in (PART, END):
                if len(parts) + size > MOST_MESSAGE_BYTES:
                    raise Malformed(f"a message of more than {MOST_MESSAGE_BYTES} bytes")
                parts += part
                if kind == END:
                    body, parts = bytes(parts), bytearray()
                    yield body
            elif kind == FILE:
                self._keep(part)
            elif kind == KILL:
                yield None
            elif kind in (ENDED, REFUSED):
                self.farewell = part.decode(errors="replace")
                self.is_refused = kind == REFUSED
                return
            elif kind != ALIVE:
                raise Malformed(f"a packet of kind {kind}, which is unknown")

    def _keep(self, part: bytes) -> None:
        self._file_bytes += len(part)
        if self._file_bytes > MOST_FILE_BYTES:
            raise Malformed(f"a file of more than {MOST_FILE_BYTES} bytes")
        if self._unkept is not None:
            return
        try:
            if self._file is None:
                handle, path = tempfile.mkstemp(".rgb", "remote-", self._spool)
                self._file, self._path = os.fdopen(handle, "wb"), Path(path)
            self._file.write(part)
        except OSError as error:  # disk full: only this request fails
            self._unkept = error
            self._drop_file()

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            self._path.unlink(missing_ok=True)

    def take_file(self) -> Path:
        """Take the received file, for its message.

        Raises:
            Malformed: no file was received.
            OSError: the file could not be stored.
        """
        unkept, self._unkept, self._file_bytes = self._unkept, None, 0
        if unkept is not None:
            raise unkept
        if self._file is None:
            raise Malformed("a message names a file that was not sent")
        try:
            self._file.close()
        except OSError:
            self._drop_file()
            raise
        self._file = None
        return self._path
