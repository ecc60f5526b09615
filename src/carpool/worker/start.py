"""Start worker processes: forked from a fork server if possible, else as new interpreters.

A new interpreter imports torch and diffusers, which takes seconds. A fork server (`forkserver.py`)
has done so in advance: a dead worker is replaced at once, and several workers share the memory of
the imported modules. Fork servers need Linux. Without one, or if it cannot fork, workers are new
interpreters.

The variable `CARPOOL_FORKSERVER` disables it (`off`), or names the Unix socket of a running one.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from carpool import __version__
from carpool.config import FORKSERVER_VARIABLE
from carpool.errors import SettingRejected, reason
from carpool.worker import encoding
from carpool.worker.protocol import FORK_REFUSED, ForkRequest

log = logging.getLogger("carpool")
_SECRETS = (b"CARPOOL_API_KEY", b"CARPOOL_API_KEY_FILE")  # workers run models' code
FORK_S = 100.0  # timeout for a fork server, which may have to import first

Process: TypeAlias = "PythonProcess | ForkedProcess"
Start = Callable[[socket.socket], Awaitable[Process]]
"""Starts a worker that serves the other end of a socket."""


async def spawn(connection: socket.socket, python: str = sys.executable) -> Process:
    """Start a worker as a new interpreter.

    Raises:
        OSError: out of memory or file descriptors.
    """
    return PythonProcess("carpool.worker.process", connection, python)


def check_python(python: str) -> None:
    """Check that an interpreter can run workers: it has this version of Carpool.

    Raises:
        SettingRejected: it has another version, or none.
    """
    code = "import carpool, carpool.worker.process; print(carpool.__version__)"
    try:
        answer = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=FORK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        rule = "must be the python of an environment"
        raise SettingRejected(f"worker_python={python!r}: {rule} ({reason(error)})") from error
    version = answer.stdout.strip()
    if answer.returncode or version != __version__:
        last = (answer.stderr.strip().splitlines() or [f"it has carpool {version}"])[-1]
        rule = f"must have carpool {__version__}: {python} -m pip install its checkout or wheel"
        raise SettingRejected(f"worker_python={python!r}: {rule} ({last})")


class ForkingStarter:
    """Starts the workers of one event loop, and their fork server.

    Args:
        python: interpreter of another environment, with this version of Carpool.
    """

    def __init__(self, python: str | None = None) -> None:
        self._python = python or sys.executable
        setting = "" if python else os.environ.get(FORKSERVER_VARIABLE, "")
        self._path = "" if setting == "off" else setting  # another process's fork server
        self._may_fork = sys.platform == "linux" and setting != "off"
        self._server: PythonProcess | None = None
        self._channel: socket.socket | None = None  # socket to the server
        self._has_forked = False

    def start_server(self) -> None:
        """Start the fork server, if there is to be one; it imports torch meanwhile.

        Raises:
            OSError: out of memory or file descriptors.
        """
        if self._may_fork and not self._path:
            if self._channel is not None:
                self._channel.close()
            self._channel, peer = socket.socketpair()
            with peer:
                self._server = PythonProcess("carpool.worker.forkserver", peer, self._python)

    async def start(self, connection: socket.socket) -> Process:
        """Start a worker that serves the other end of a socket.

        Raises:
            OSError: out of memory or file descriptors.
        """
        if self._may_fork:
            try:
                async with asyncio.timeout(FORK_S):
                    return await self._fork(connection)
            except (OSError, EOFError) as error:
                log.debug("the fork server started no worker: %s", reason(error))
                self._may_fork = self._has_forked or bool(self._path)
        return await spawn(connection, self._python)

    async def close(self) -> None:
        """End the fork server. Close its workers first."""
        self._may_fork = False
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.kill()
            await self._server.wait()

    async def _fork(self, connection: socket.socket) -> Process:
        with contextlib.ExitStack() as cleanup:
            request = cleanup.enter_context(self._request_socket())
            socket.send_fds(request, [b"\0"], [connection.fileno(), 1, 2])
            reader, writer = await asyncio.open_unix_connection(sock=request)
            cleanup.callback(writer.close)
            writer.write(encoding.encode(ForkRequest(_environ(), os.getcwdb(), _umask())))
            if (pid := await _number(reader)) == FORK_REFUSED:
                raise EOFError("it was started with other variables of the environment")
            self._has_forked = True
            if self._server is not None and pid == self._server.pid:
                worker, self._server, self._may_fork = self._server, None, False
                return worker
            cleanup.pop_all()
            return ForkedProcess(pid, reader, writer)

    def _request_socket(self) -> socket.socket:
        """A socket to the fork server to request one worker."""
        if self._path:
            channel = socket.socket(socket.AF_UNIX)
            try:
                channel.connect(self._path)
            except BaseException:
                channel.close()
                raise
            return channel
        if self._server is None or self._server.returncode is not None:
            self.start_server()
        assert self._channel is not None
        channel, peer = socket.socketpair()
        with peer:
            try:
                socket.send_fds(self._channel, [b"\0"], [peer.fileno()])
            except BaseException:
                channel.close()
                raise
        return channel


class PythonProcess:
    """A module that runs as a process, with a socket's descriptor number as its argument."""

    has_lost_parent = False

    def __init__(self, module: str, inherited: socket.socket, python: str) -> None:
        self._process = subprocess.Popen(
            _command(module, inherited, python),
            pass_fds=[inherited.fileno()], stdin=subprocess.DEVNULL,
            start_new_session=True,  # the front handles Ctrl-C
            env=_environ(),
        )  # fmt: skip
        self.pid, self.kill = self._process.pid, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)


class ForkedProcess:
    """A forked worker; its parent, the fork server, reports its end."""

    def __init__(self, pid: int, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader, self._writer, self.pid = reader, writer, pid
        self.returncode: int | None = None
        self.has_lost_parent = False  # the fork server died, and its workers with it
        self._end = asyncio.create_task(self._read_end())

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    async def _read_end(self) -> int:
        try:
            self.returncode = await _number(self._reader)
        except (OSError, EOFError):
            self.returncode, self.has_lost_parent = -signal.SIGKILL, True
        finally:
            self._writer.close()
        return self.returncode


async def _number(reader: StreamReader) -> int:
    [number] = encoding.NUMBER.unpack(await reader.readexactly(encoding.NUMBER.size))
    return int(number)


def _command(module: str, inherited: socket.socket, python: str) -> list[str]:
    return [python, "-m", module, str(inherited.fileno())]


def _environ() -> dict[bytes, bytes]:
    return {name: text for name, text in os.environb.items() if name not in _SECRETS}


def _umask() -> int:
    """This process's umask, read without setting it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
