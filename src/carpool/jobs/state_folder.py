"""Lock a folder for one job store; refuse folders of other programs, and incomplete ones.

People point `--state-dir` at folders that they have, restore half of a backup, or copy a folder
while a server runs. So nothing is made, changed or removed before the folder is known to be ours
and its database to belong to the results beside it. What is not certain is refused with what to do.

A server without a state folder has a `ScratchFolder`. The kernel drops the lock on it when its
process ends, however it does, and the next process removes it.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from carpool.jobs.database import NAME as DATABASE
from carpool.jobs.database import identify, page_bytes
from carpool.jobs.wal import unreadable_commits

MARKER = "carpool-state.txt"
FOLDERS = ("files", "inputs", "passing", "links", "journals")
RESULTS = FOLDERS[:2]  # what a database is the index of
LOG = f"{DATABASE}-wal"
LOCK = "lock"
PREFIX = "carpool-jobs-"  # prefix of scratch folders
_FILES = (MARKER, DATABASE, LOG, f"{DATABASE}-shm", LOCK)
_NOT_COUNTED = {"lost+found"}  # is in every new file system
_TEXT = "This folder belongs to `carpool serve --state-dir`, which removes what it made here.\n"
_IS_OPEN = b"open\n"  # in the lock file, from the opening of the database until its log is merged


class StateFolder:
    """A folder that this process alone uses, until `close` or its end."""

    def __init__(self, path: Path) -> None:
        """Lock a folder; it is made if it is missing.

        Raises:
            OSError: it is not a store's, not whole, or another process uses it. It is as before.
        """
        self._log, self._lock = path / LOG, -1
        names = _names(path)
        try:
            if LOCK in names:
                self._lock = _locked(path / LOCK, os.O_RDWR)
            if names:
                _check(path, names)
            if LOCK in names:
                _check_log(path, is_due=os.pread(self._lock, len(_IS_OPEN), 0) == _IS_OPEN)
            _make(path)
            if self._lock < 0:
                self._lock = _locked(path / LOCK, os.O_RDWR | os.O_CREAT)
        except BlockingIOError:
            raise OSError("another server uses it: give each its own --state-dir") from None
        except BaseException:
            if self._lock >= 0:
                os.close(self._lock)
            raise

    def opened(self) -> None:
        """Note that the database is open: if this process is killed, its log is needed."""
        os.pwrite(self._lock, _IS_OPEN, 0)

    def merged(self) -> None:
        """Note that the log is merged into the database."""
        os.ftruncate(self._lock, 0)

    def close(self) -> None:
        """Release the lock. Harmless when done twice."""
        if self._lock >= 0:
            if not self._log.exists():  # SQLite merged it as the database was closed
                self.merged()
            os.close(self._lock)
            self._lock = -1


class ScratchFolder:
    """A folder of this process alone, under `TMPDIR`, until `remove`."""

    _NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")

    def __init__(self) -> None:
        """Make a folder, and remove folders of dead processes.

        Raises:
            OSError: there is no place for it.
        """
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if self._NAME.fullmatch(path.name):
                with suppress(OSError):  # a link, in use, gone, or another user's
                    self._sweep(path)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            with suppress(FileNotFoundError, BlockingIOError):  # another process sweeps it
                # NFS locks no folders: one there is used without, and never swept
                self._lock = _locked(self.path, os.O_DIRECTORY, is_lock_needed=False)
                if _is_ours(self.path, self._lock):
                    (self.path / MARKER).touch()
                    return
                os.close(self._lock)  # it was swept before it was locked

    @staticmethod
    def _sweep(path: Path) -> None:
        lock = _locked(path, os.O_DIRECTORY)
        try:
            if not _is_ours(path, lock):
                return
            if (path / MARKER).is_file():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rmdir()  # its process died before the marker; fails where anything is in it
        finally:
            os.close(lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _names(path: Path) -> set[str]:
    """The entries of a folder; raises OSError if one has our name but is not what we make."""
    try:
        names = set(os.listdir(path)) - _NOT_COUNTED
    except FileNotFoundError:
        return set()
    for name in sorted(names & {*FOLDERS, *_FILES}):
        mode = (path / name).lstat().st_mode
        if not (stat.S_ISDIR(mode) if name in FOLDERS else stat.S_ISREG(mode)):
            kind = "symbolic link" if stat.S_ISLNK(mode) else "file of another kind"
            raise OSError(f"{name} in it is a {kind}: give a folder of Carpool's own")
    return names


def _check(path: Path, names: Collection[str]) -> None:
    """Raise OSError if a folder with these names is no store's, or not whole. Changes nothing."""
    version = identify(path / DATABASE) if DATABASE in names else "missing"
    if MARKER not in names and version not in ("ours", "newer"):
        listing = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        raise OSError(
            f"it holds files that are not Carpool's ({listing}): give an empty folder, or one that "
            f"does not exist yet, such as {path / 'carpool'}"
        )
    if version == "newer":
        raise OSError("a newer Carpool wrote it: use that one, or give another folder")
    if version == "foreign":
        raise OSError(
            f"{DATABASE} is damaged, or no database of Carpool's: restore it from a backup, or "
            "move it away together with files and inputs to begin anew"
        )
    has_results = any(any((path / name).iterdir()) for name in RESULTS if name in names)
    has_log = LOG in names and (path / LOG).stat().st_size > 0
    if version == "missing" and (has_results or has_log):
        raise OSError(
            f"{DATABASE} is missing or empty, and what belongs to it is there: restore it, with "
            f"{LOG}, or move {LOG}, files and inputs away to begin anew"
        )


def _check_log(path: Path, *, is_due: bool) -> None:
    """Raise OSError if what was written last is missing or unreadable, in a locked folder.

    Args:
        is_due: the last process ended before it merged the log into the database.
    """
    if is_due and not (path / LOG).exists():
        raise OSError(
            f"{LOG} is missing: the last server was killed, and what it wrote last is in that "
            f"file. Put it back beside {DATABASE}, or remove {LOCK} to go on without"
        )
    if (path / DATABASE).exists():
        commits = unreadable_commits(path / LOG, page_bytes(path / DATABASE))
        if commits > 1:
            raise OSError(
                f"{LOG} is damaged, {commits} changes of jobs in it cannot be read: restore it "
                f"from a backup, or remove it and {LOCK} to go on without them"
            )


def _make(path: Path) -> None:
    """Make what is missing of a folder, and keep other users out."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    if not (path / MARKER).exists():
        (path / MARKER).write_text(_TEXT)
    for name in FOLDERS:
        (path / name).mkdir(mode=0o700, exist_ok=True)


def _locked(path: Path, flags: int, *, is_lock_needed: bool = True) -> int:
    """Open and lock a file or folder, which must not be a link, until the process ends.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it cannot be opened, or not locked if that is needed.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if is_lock_needed or isinstance(error, BlockingIOError):
            os.close(descriptor)
            raise
    return descriptor


def _is_ours(path: Path, descriptor: int) -> bool:
    """Return whether an open folder is this user's, private, and still the one at `path`."""
    status = os.fstat(descriptor)
    is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
    try:
        return is_private and os.path.samestat(status, path.lstat())
    except FileNotFoundError:
        return False
