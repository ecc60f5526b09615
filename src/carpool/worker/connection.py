"""One worker process and the socket to it, from the front's side.

Outputs that are too large for a frame come as files. They are mapped when they are heard of, and
have no name from then on; those of which nothing was heard go with their worker. So none stays,
whoever loses interest or dies.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from carpool.errors import StoreFailed, reason
from carpool.worker import protocol

log = logging.getLogger("carpool")
_PATIENCE_S = 2.0  # for a process whose socket is closed
_SECRETS = ("CARPOOL_API_KEY", "CARPOOL_API_KEY_FILE")  # the worker runs the code of models


class Link:
    """A worker process. Its end is the end of `heard`, however it came about."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passing: Path | None = None,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._passing = passing

    @classmethod
    async def open(cls, passing: Path | None = None) -> "Link":
        """Start a process.

        Args:
            passing: the folder where it is going to put large outputs.

        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "carpool.worker.process", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the front's to handle
                env={name: text for name, text in os.environ.items() if name not in _SECRETS},
            )  # fmt: skip
        finally:
            theirs.close()
        return cls(process, *await asyncio.open_unix_connection(sock=ours), passing)

    def send(self, frame: protocol.ToWorker) -> None:
        """Send a frame soon, in order."""
        self._writer.write(protocol.encode(frame))

    async def heard(self) -> AsyncIterator[protocol.ToFront]:
        """What the worker says, until it hangs up."""
        while True:
            try:
                header = await self._reader.readexactly(protocol.LENGTH.size)
                body = await self._reader.readexactly(protocol.LENGTH.unpack(header)[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            frame = protocol.decode_to_front(body)
            yield _mapped(frame) if isinstance(frame, protocol.Done) else frame

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
        with contextlib.suppress(OSError):  # somebody has removed the folder, say
            for path in self._passing.iterdir() if self._passing else ():
                path.unlink()


def _mapped(done: protocol.Done) -> protocol.Done | protocol.Failed:
    """Have an output that lies in a file read as bytes are, and the file end with its last user."""
    if done.clip is None or not done.clip.path:
        return done
    path, done.clip.path = Path(done.clip.path), ""
    try:
        with path.open("rb") as file:
            # a buffer as any, and nobody asks more of it
            done.clip.rgb = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # type: ignore[assignment]
    except OSError as error:
        log.error("an output could not be taken over: %s", error)
        said = f"the output could not be taken over: {reason(error)}"
        return protocol.Failed(done.request_id, StoreFailed.__name__, said)
    finally:
        path.unlink(missing_ok=True)
    return done
