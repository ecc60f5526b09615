"""Lock a folder for one job store; refuse folders of other programs, and incomplete ones.

Users point `--state-dir` at existing folders, restore half of a backup, or copy a folder of a
running server. So nothing is created, changed or removed until the folder is proven to be Carpool's
and its database to match its results. Doubtful folders are refused, with a fix in the message.

A server without a state folder has a `ScratchFolder`. The kernel releases its lock at any end of
the process, and the next process removes the folder.
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
RESULTS = FOLDERS[:2]  # folders that the database indexes
LOG = f"{DATABASE}-wal"
LOCK = "lock"
PREFIX = "carpool-jobs-"  # prefix of scratch folders
_FILES = (MARKER, DATABASE, LOG, f"{DATABASE}-shm", LOCK)
_NOT_COUNTED = {"lost+found"}  # every new file system has it
_TEXT = "This folder belongs to `carpool serve --state-dir`, which removes what it made here.\n"
_IS_OPEN = b"open\n"  # content of the lock file until the log is merged


class StateFolder:
    """A folder locked by this process until `close` or its end."""

    def __init__(self, path: Path) -> None:
        """Lock a folder; create it if it is missing.

        Raises:
            OSError: not a store's folder, incomplete, or in use. The folder is unchanged.
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
        """Record that the database is open: after a kill its log is needed."""
        os.pwrite(self._lock, _IS_OPEN, 0)

    def merged(self) -> None:
        """Record that the log is merged into the database."""
        os.ftruncate(self._lock, 0)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            if not self._log.exists():  # SQLite merged it on closing the database
                self.merged()
            os.close(self._lock)
            self._lock = -1


class ScratchFolder:
    """A temporary folder of this process under `TMPDIR`, until `remove`."""

    _NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")

    def __init__(self) -> None:
        """Make a folder, and remove folders of dead processes.

        Raises:
            OSError: no temporary folder can be created.
        """
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if self._NAME.fullmatch(path.name):
                with suppress(OSError):  # a link, in use, removed, or another user's
                    self._sweep(path)
        made = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))  # swept under its final name only
        (made / MARKER).touch()
        # NFS cannot lock folders: there it is used unlocked, and never swept
        self._lock = _locked(made, os.O_DIRECTORY, is_lock_needed=False)
        self.path = made.rename(made.with_name(made.name.removeprefix("new-")))

    @staticmethod
    def _sweep(path: Path) -> None:
        lock = _locked(path, os.O_DIRECTORY)
        try:
            if _is_ours(path, lock) and (path / MARKER).is_file():
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _names(path: Path) -> set[str]:
    """The entries of a folder; OSError if an entry has our name but another file type."""
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
    """Raise OSError if a folder with these names is not a complete store. Changes nothing."""
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
            f"{DATABASE} is damaged, or not Carpool's database: restore it from a backup, or "
            "move it away together with files and inputs to start afresh"
        )
    has_results = any(any((path / name).iterdir()) for name in RESULTS if name in names)
    has_log = LOG in names and (path / LOG).stat().st_size > 0
    if version == "missing" and (has_results or has_log):
        raise OSError(
            f"{DATABASE} is missing or empty, but its files exist: restore it, with "
            f"{LOG}, or move {LOG}, files and inputs away to start afresh"
        )


def _check_log(path: Path, *, is_due: bool) -> None:
    """Raise OSError if the last writes of a locked folder are missing or unreadable.

    Args:
        is_due: the last process stopped before it merged the log into the database.
    """
    if is_due and not (path / LOG).exists():
        raise OSError(
            f"{LOG} is missing: the last server was killed, and its last changes are in that "
            f"file. Put it back next to {DATABASE}, or remove {LOCK} to continue without them"
        )
    if (path / DATABASE).exists():
        commits = unreadable_commits(path / LOG, page_bytes(path / DATABASE))
        if commits > 1:
            raise OSError(
                f"{LOG} is damaged: {commits} changes of jobs cannot be read. Restore it "
                f"from a backup, or remove it and {LOCK} to continue without them"
            )


def _make(path: Path) -> None:
    """Create a folder and its parents, closed to other users."""
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
        OSError: it cannot be opened, or locked if needed.
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
    """Return whether an open folder is this user's, private, and still at `path`."""
    status = os.fstat(descriptor)
    is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
    try:
        return is_private and os.path.samestat(status, path.lstat())
    except FileNotFoundError:
        return False
