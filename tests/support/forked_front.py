"""Fronts forked from one process that has imported them: a start costs no second of imports.

`python -m support.forked_front PATH` listens on a Unix socket. `Front` is what `subprocess.Popen`
would be. Between the two is one process for each front, which waits for it and tells its status.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from carpool.worker import startup

_NUMBER = struct.Struct(">i")  # a process id, then an exit status
_REQUEST_BYTES = 1 << 20


class Front:
    """A `carpool` command that runs; `arguments` are what follows its name."""

    def __init__(
        self,
        path: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(path)
        request = json.dumps([list(arguments), dict(environ), os.getcwd()]).encode()
        socket.send_fds(self._connection, [request], [stdout.fileno(), stderr.fileno()])
        self.pid = int(_NUMBER.unpack(self._connection.recv(_NUMBER.size))[0])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                [self.returncode] = _NUMBER.unpack(self._connection.recv(_NUMBER.size))
            except (BlockingIOError, TimeoutError) as error:
                raise subprocess.TimeoutExpired("carpool", timeout or 0.0) from error
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_server(path: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that forks fronts, and wait until it listens at a path."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.forked_front", path],
        stdin=subprocess.DEVNULL,
        env={**environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    while not Path(path).exists():
        assert process.poll() is None, "no fronts can be forked"
        time.sleep(0.01)
    return process


def main() -> None:
    startup.die_with_parent()
    import carpool.server.run  # noqa: F401

    gc.freeze()  # no collection in a front looks at what it shares with all others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those between end
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as source:
        path = sys.argv[1]
        source.bind(f"{path}.bound")
        source.listen()
        Path(f"{path}.bound").rename(path)
        while True:
            connection, _ = source.accept()
            if os.fork() == 0:
                break
            connection.close()
    _run(connection)


def _run(connection: socket.socket) -> NoReturn:
    """Fork a front; in the process between, wait for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, outputs, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
    if (pid := os.fork()) == 0:
        connection.close()
        _become_front(request, outputs)
    for each in outputs:
        os.close(each)  # who has them open is a process of that server
    connection.send(_NUMBER.pack(pid))
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        connection.send(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)  # to tidy up all that was imported would take a tenth of a second


def _become_front(request: bytes, outputs: Sequence[int]) -> NoReturn:
    from carpool.cli.main import main as command

    for target, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, target)
        os.close(output)
    arguments, environ, folder = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["carpool", *arguments]
    try:
        command()
    finally:
        assert "torch" not in sys.modules, "a front has loaded torch"
    sys.exit(0)


if __name__ == "__main__":
    main()
