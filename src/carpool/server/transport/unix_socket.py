"""A Unix socket to listen on: one that a dead server has left is replaced, a living one's never."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

WAITING = 2048  # connections that the kernel keeps until they are accepted, as uvicorn has it
_MODE = 0o666  # who may connect is up to the folder


class UnixSocket:
    """A socket that this process listens on, and its file."""

    def __init__(self, path: Path) -> None:
        """Make both. May wait for other servers that start in the same folder.

        Raises:
            OSError: a server listens there, something else lies there, or it cannot be made.
        """
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            with _alone_in(path.parent):
                mode = _make_way(path)
                self.socket.bind(str(path))
                self._seen = path.lstat()
                path.chmod(mode)
                self.socket.listen(WAITING)  # before others look whether it lives
        except OSError:
            self.socket.close()
            raise

    def remove(self) -> None:
        """Remove the file, unless another server's has taken its place."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), self._seen):
                self.path.unlink()


def _make_way(path: Path) -> int:
    """Remove a socket that nobody listens on; gives the permissions for the new one.

    Raises:
        OSError: there is something that must stay.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return _MODE
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # the queue of one that is alive may be full
        is_alive = probe.connect_ex(str(path)) != errno.ECONNREFUSED
    if is_alive:
        raise OSError(errno.EADDRINUSE, "address already in use: a server listens there")
    path.unlink()
    return stat.S_IMODE(mode)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that of two servers that start only one finds the place free."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders, and has no living sockets
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
