"""The folder that a store keeps its jobs in, claimed only if it is new, empty, or a store's.

People point `--state-dir` at folders that they have, restore half of a backup, or copy a folder
while a server runs. So nothing is made, changed or removed before the folder is known to be ours
and its database to belong to the results beside it. What is not certain is refused with what to do.
"""

import fcntl
import os
import stat
from collections.abc import Collection
from pathlib import Path

from carpool.jobs.database import NAME as DATABASE
from carpool.jobs.database import look, page_bytes
from carpool.jobs.wal import unreadable_commits

MARKER = "carpool-state.txt"
FOLDERS = ("files", "inputs", "passing", "links")
RESULTS = FOLDERS[:2]  # what a database is the index of
LOG = f"{DATABASE}-wal"
LOCK = "lock"
_FILES = (MARKER, DATABASE, LOG, f"{DATABASE}-shm", LOCK)
_NOT_COUNTED = {"lost+found"}  # stands in every new file system
_TEXT = "This folder belongs to `carpool serve --state-dir`, which removes what it made here.\n"
_IS_OPEN = b"open\n"  # in the lock, from the opening of the database until all of it is written


class StateFolder:
    """A folder that this process alone uses, until `close` or its end."""

    def __init__(self, path: Path) -> None:
        """Claim a folder; made if it is missing.

        Raises:
            OSError: it is not a store's, not whole, or another process uses it. It is as before.
        """
        self._log = path / LOG
        names = _names(path)
        lock = _locked(path / LOCK, os.O_RDWR) if LOCK in names else None
        try:
            if names:
                _check(path, names)
            if lock is not None:
                _check_log(path, is_due=os.pread(lock, len(_IS_OPEN), 0) == _IS_OPEN)
            _make(path)
            if lock is None:
                lock = _locked(path / LOCK, os.O_RDWR | os.O_CREAT)
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        self._lock: int | None = lock

    def opened(self) -> None:
        """The database is open: from now on its log is needed, if this process is killed."""
        if self._lock is not None:
            os.pwrite(self._lock, _IS_OPEN, 0)

    def written(self) -> None:
        """All of the database is in its own file."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)

    def close(self) -> None:
        """Let another process claim it. Harmless when done twice."""
        if self._lock is not None:
            if not self._log.exists():  # SQLite brought it into the database as it was closed
                self.written()
            os.close(self._lock)
            self._lock = None


def _names(path: Path) -> set[str]:
    """What lies in a folder; raises OSError if what has our names is not what we make."""
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
    found = look(path / DATABASE) if DATABASE in names else "missing"
    if MARKER not in names and found not in ("ours", "newer"):
        shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        raise OSError(
            f"it holds files that are not Carpool's ({shown}): give an empty folder, or one that "
            f"does not exist yet, such as {path / 'carpool'}"
        )
    if found == "newer":
        raise OSError("a newer Carpool wrote it: use that one, or give another folder")
    if found == "foreign":
        raise OSError(
            f"{DATABASE} is damaged, or no database of Carpool's: restore it from a backup, or "
            "move it away together with files and inputs to begin anew"
        )
    has_results = any(any((path / name).iterdir()) for name in RESULTS if name in names)
    has_log = LOG in names and (path / LOG).stat().st_size > 0
    if found == "missing" and (has_results or has_log):
        raise OSError(
            f"{DATABASE} is missing or empty, and what belongs to it is there: restore it, with "
            f"{LOG}, or move {LOG}, files and inputs away to begin anew"
        )


def _check_log(path: Path, *, is_due: bool) -> None:
    """Raise OSError if what was written last is missing, or cannot be read, in a claimed folder.

    Args:
        is_due: the last process did not live to bring all of the log into the database.
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
    seen = path.stat()
    if seen.st_uid == os.geteuid() and stat.S_IMODE(seen.st_mode) & 0o077:
        path.chmod(0o700)
    if not (path / MARKER).exists():
        (path / MARKER).write_text(_TEXT)
    for name in FOLDERS:
        (path / name).mkdir(mode=0o700, exist_ok=True)


def _locked(path: Path, flags: int) -> int:
    """Lock a file for this process; the kernel holds it until the process is gone."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OSError("another server uses it: give each its own --state-dir") from None
    return descriptor
