"""Listening sockets of addresses and of files, which limit the connections accepted in one turn.

When descriptors run out, asyncio stops listening for a second. Up to Python 3.13 it first retries
for each connection that it may accept in that turn; each failure logs a line and starts another
timer, and these multiply every second. Here the first failure ends the turn. A Unix socket replaces
a stale file, but never a running server's.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAITING = 2048  # backlog of the kernel, as in uvicorn
ACCEPTED = 256
"""Connections accepted in one turn of the event loop, about 10 ms. A burst of 375 connections takes
two turns; at half this value it takes three turns, at twice one turn."""
_PAUSE_S = 0.5  # asyncio pauses 1 s; failures within it are not logged again
_MODE = 0o666  # the folder's permissions decide who may connect
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ListeningSocket(socket.socket):
    """A listening socket that reports exhausted descriptors once a second."""

    _resumes_s = 0.0  # `time.monotonic`

    def listen(self, backlog: int = WAITING) -> None:
        """Listen with a backlog of `WAITING` or more: asyncio passes `ACCEPTED` for both limits."""
        super().listen(max(backlog, WAITING))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: no connection waits, or descriptors have just run out.
            OSError: descriptors have run out.
        """
        if time.monotonic() < self._resumes_s:
            raise BlockingIOError(errno.EAGAIN, "descriptors have run out")
        try:
            return super().accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._resumes_s = time.monotonic() + _PAUSE_S
            raise


def listen_on(host: str, port: int) -> list[ListeningSocket]:
    """Listen on all addresses of a host.

    Raises:
        socket.gaierror, UnicodeError: the host has no address.
        OSError: an address is taken or needs privileges, or none belongs to this machine.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[ListeningSocket] = []
    foreign: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        try:
            plain = socket.create_server(address, family=family)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                foreign = error  # localhost without IPv6
                continue
            for listener in sockets:
                listener.close()
            raise
        sockets.append(ListeningSocket(family, kind, protocol, fileno=plain.detach()))
        sockets[-1].listen()
    if foreign is not None and not sockets:
        raise foreign
    return sockets


class UnixSocket:
    """A listening socket and its file."""

    def __init__(self, path: Path) -> None:
        """Bind and listen. May wait for other servers starting in the same folder.

        Raises:
            OSError: a server listens there, another kind of file exists, or bind failed.
        """
        self.path = path
        self.socket = ListeningSocket(socket.AF_UNIX)
        try:
            with _locked(path.parent):
                mode = _remove_stale(path)
                self.socket.bind(str(path))
                self._status = path.lstat()
                path.chmod(mode)
                self.socket.listen()  # before another server probes it
        except OSError:
            self.socket.close()
            raise

    def remove(self) -> None:
        """Remove the file, unless another server has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), self._status):
                self.path.unlink()


def _remove_stale(path: Path) -> int:
    """Remove a socket without a listener; returns the mode for the new socket.

    Raises:
        OSError: the file must stay.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return _MODE
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a live server's queue may be full
        is_alive = probe.connect_ex(str(path)) != errno.ECONNREFUSED
    if is_alive:
        raise OSError(errno.EADDRINUSE, "address already in use: a server listens there")
    path.unlink()
    return stat.S_IMODE(mode)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so only one of two starting servers finds the path free."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # NFS cannot lock folders, and has no live sockets
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
