"""One worker process and the socket to it, from the front's side."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

from carpool import frames

_PATIENCE_S = 2.0  # for a process whose socket is closed


class Link:
    """A worker process. Its end is the end of `heard`, however it came about."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def open(cls) -> "Link":
        """Start a process."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "carpool.worker", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the front's to handle
            )  # fmt: skip
        finally:
            theirs.close()
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    def send(self, frame: frames.ToWorker) -> None:
        """Send a frame soon, in order."""
        self._writer.write(frames.encode(frame))

    async def heard(self) -> AsyncIterator[frames.ToFront]:
        """What the worker says, until it hangs up."""
        while True:
            try:
                header = await self._reader.readexactly(frames.LENGTH.size)
                body = await self._reader.readexactly(frames.LENGTH.unpack(header)[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield frames.decode_to_front(body)

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        """Hang up, and wait for the process; end it if it does not end by itself."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _PATIENCE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
