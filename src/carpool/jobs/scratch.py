"""A temporary folder that does not stay for good, however the process that made it ended.

Its process holds a lock on the folder itself, and the kernel drops that with the process. So a
folder that can be locked is nobody's any more, and the next process that makes one removes it, if
it has the name and the marker of such a folder.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from carpool.jobs.state_folder import MARKER

PREFIX = "carpool-jobs-"
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")


class Scratch:
    """A folder of this process alone, under `TMPDIR`, until `remove`."""

    def __init__(self) -> None:
        """Make it, and remove those that dead processes have left.

        Raises:
            OSError: there is no place for it.
        """
        _sweep(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            with contextlib.suppress(FileNotFoundError, BlockingIOError):  # somebody sweeps it
                self._lock = _opened(self.path)
                if _is_ours(self.path, self._lock):
                    (self.path / MARKER).touch()
                    return
                os.close(self._lock)  # it was swept before it was locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # a link, in use, gone, or another user's
            lock = _opened(path, is_lock_needed=True)
            try:
                if not _is_ours(path, lock):
                    continue
                if (path / MARKER).is_file():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.rmdir()  # it died before the marker; fails where anything is in it
            finally:
                os.close(lock)


def _opened(path: Path, *, is_lock_needed: bool = False) -> int:
    """Open and lock a folder, which must not be a link.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it is no folder, or another user's, or it cannot be locked but would have to be.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # NFS locks no folders: one there is used without, and never swept
        if is_lock_needed or isinstance(error, BlockingIOError):
            os.close(descriptor)
            raise
    return descriptor


def _is_ours(path: Path, descriptor: int) -> bool:
    """Whether an open folder is this user's, private, and still what lies there."""
    seen = os.fstat(descriptor)
    is_private = seen.st_uid == os.geteuid() and stat.S_IMODE(seen.st_mode) == 0o700
    try:
        return is_private and os.path.samestat(seen, path.lstat())
    except FileNotFoundError:
        return False
