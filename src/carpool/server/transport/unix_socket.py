"""A listening Unix socket; replaces a stale file, but never a running server's."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from carpool.server.transport.listening import ListeningSocket

_MODE = 0o666  # the folder's permissions decide who may connect


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
