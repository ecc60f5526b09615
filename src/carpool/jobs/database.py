"""The SQLite database of jobs: schema, transactions, and rows as `Record`s.

WAL mode with `synchronous = FULL`: a committed transaction is on the disk. All threads share one
connection, one statement at a time.
"""

import contextlib
import errno
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from carpool.errors import StoreFailed
from carpool.jobs.clock import StoreClock

JobState = Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
End = Literal["failed", "cancelled", "expired"]
OPEN: tuple[JobState, ...] = ("queued", "in_progress")
NAME = "jobs.sqlite"
VERSION = 1  # version of the schema
_APPLICATION = 0x43504F4C  # "CPOL": the application id in SQLite's header
_LEAST_BYTES = 1 << 20  # free bytes; with less, SQLite's log and index may not fit
SqlValues = Sequence[Any] | dict[str, Any]
T = TypeVar("T")

_TABLES = """
CREATE TABLE jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order in which they were accepted
  id TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL,
  owner TEXT NOT NULL,
  state TEXT NOT NULL,
  asked TEXT NOT NULL,  -- JSON: as the client may see it again
  work TEXT NOT NULL,  -- JSON: as it is run
  progress INTEGER NOT NULL DEFAULT 0,
  losses INTEGER NOT NULL DEFAULT 0,  -- not used; older versions read it
  created_s REAL NOT NULL,
  started_s REAL,
  ended_s REAL,
  error TEXT,  -- JSON
  files TEXT NOT NULL DEFAULT '{}',  -- JSON: bytes by name
  bytes INTEGER NOT NULL DEFAULT 0,
  idempotency_key TEXT,
  digest TEXT,
  UNIQUE (owner, idempotency_key)
);
CREATE INDEX by_state ON jobs (state, number);
"""
_ADDITIONS = """
CREATE INDEX IF NOT EXISTS by_size ON jobs (state, ended_s, number, bytes, id) WHERE bytes > 0;
CREATE INDEX IF NOT EXISTS by_age ON jobs (ended_up_s);
CREATE INDEX IF NOT EXISTS by_owner ON jobs (owner, number);
DROP INDEX IF EXISTS by_end;
CREATE TABLE IF NOT EXISTS uptime (seconds REAL NOT NULL);
CREATE INDEX IF NOT EXISTS by_due ON jobs (due_s) WHERE due_s IS NOT NULL;
INSERT INTO uptime SELECT 0.0 WHERE NOT EXISTS (SELECT 1 FROM uptime);
"""  # tables and indexes that older files of this version lack
_COLUMNS = {"id", "kind", "owner", "state", "asked", "work", "files"}  # columns of every version
_LATER_COLUMNS = {  # older files of this version lack them; the texts are JSON
    **dict.fromkeys(("created_up_s", "ended_up_s", "due_s"), "REAL"),
    **dict.fromkeys(("warnings", "timings", "skipped_steps", "settings", "deliveries"), "TEXT"),
}


@dataclass(frozen=True, slots=True)
class Record:
    """A stored job. Times are Unix seconds or uptime, see `clock.py`."""

    number: int
    id: str
    kind: str  # "image", "video", "mesh", "sound"
    owner: str  # the client that may see it
    state: JobState
    asked: dict[str, Any]
    work: dict[str, Any]  # empty: the row is damaged
    progress: int  # percent; never falls, even if the job runs again
    created_s: float
    started_s: float | None
    ended_s: float | None
    created_up_s: float
    ended_up_s: float | None
    error: dict[str, Any] | None
    files: dict[str, int] = field(hash=False)  # bytes by name
    warnings: tuple[str, ...]  # texts for the client, such as "the prompt was truncated"
    timings: dict[str, float] | None = field(default=None, hash=False)  # the slowest request's
    skipped_steps: tuple[int, ...] = ()  # steps that `step_cache` skipped, by output; () for none
    settings: dict[str, Any] | None = field(default=None, hash=False)  # the first output's
    deliveries: dict[str, Any] | None = field(default=None, hash=False)  # see `outbox.py`
    due_s: float | None = None  # uptime of the next delivery attempt

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


_FIELDS = tuple(column.name for column in fields(Record))
_JSON = ("asked", "work", "error", "files", "timings", "settings", "deliveries")


def record_of(row: sqlite3.Row) -> Record:
    """Convert a row to a record; damaged JSON becomes {}."""
    values = {name: row[name] for name in _FIELDS}
    values |= {name: _loads(row[name], dict) for name in _JSON if row[name] is not None}
    warnings: list[Any] = _loads(row["warnings"] or "[]", list)
    skipped: list[Any] = _loads(row["skipped_steps"] or "[]", list)
    values["skipped_steps"] = tuple(count for count in skipped if isinstance(count, int))
    return Record(**values | {"warnings": tuple(map(str, warnings))})


def _loads(text: str, kind: Callable[[], T]) -> T:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return kind()
    return value if isinstance(value, type(kind())) else kind()


class Database:
    """The database of one folder, or in memory, and its only writer."""

    def __init__(self, path: Path | None) -> None:
        """Open a file and create missing tables; None: in memory.

        Raises:
            OSError: the file is unusable or damaged.
        """
        self._lock, self.is_closed = threading.RLock(), False
        try:
            self._db = _connect(path or ":memory:")
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error
        except sqlite3.DatabaseError as error:
            raise OSError(f"{NAME} is damaged ({error}): restore it from a backup") from error

    def checkpoint(self) -> bool:
        """Merge the write-ahead log into the file; returns whether the disk had room."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            is_blocked, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not is_blocked
        return False

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self.is_closed = True

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: either all of it reaches the disk, or nothing."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                if not isinstance(error, sqlite3.Error):
                    raise
                self.checkpoint()  # this frees space on a full disk
                raise StoreFailed("the store of jobs cannot be written just now") from error

    def write(self, query: str, values: SqlValues = ()) -> list[sqlite3.Row]:
        """Run one statement as a transaction; returns its RETURNING rows."""
        with self.writing() as db:
            return db.execute(query, values).fetchall()

    def read(self, query: str, values: SqlValues = ()) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise StoreFailed("the store of jobs cannot be read just now") from error


def _connect(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.row_factory = sqlite3.Row
        if (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(problem.splitlines()[-1][:80])
        [version] = db.execute("PRAGMA user_version").fetchone()
        if version == 0:  # before the log exists, so the file itself identifies its owner
            name = f"PRAGMA user_version = {VERSION}; PRAGMA application_id = {_APPLICATION}"
            db.executescript(f"BEGIN; {_TABLES} {name}; COMMIT")
        if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            db.execute(f"PRAGMA application_id = {_APPLICATION}")
        columns = {row["name"] for row in db.execute("PRAGMA table_info(jobs)")}
        for name, kind in _LATER_COLUMNS.items():
            if name not in columns:
                db.execute(f"ALTER TABLE jobs ADD COLUMN {name} {kind}")
        db.executescript(f"BEGIN; {_ADDITIONS} COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -512")  # KiB; the page cache holds the rest
    except BaseException:
        db.close()
        raise
    return db


def resume_time(db: Database, clock: StoreClock) -> None:
    """Continue jobs' ages from the last close of the store.

    A time in the future was written under another wall clock: it becomes now.
    """
    queries = ("SELECT seconds FROM uptime", "SELECT max(created_up_s) FROM jobs",
               "SELECT max(ended_up_s) FROM jobs")  # fmt: skip
    clock.resume(max(db.read(query)[0][0] or 0.0 for query in queries))
    query = """UPDATE jobs SET created_s = min(created_s, :now),
        started_s = min(started_s, :now), ended_s = min(ended_s, :now),
        created_up_s = coalesce(created_up_s, :up),
        ended_up_s = iif(ended_s IS NULL, NULL, coalesce(ended_up_s, :up))
        WHERE max(created_s, coalesce(started_s, 0), coalesce(ended_s, 0)) > :now
        OR created_up_s IS NULL OR (ended_s IS NOT NULL AND ended_up_s IS NULL)"""
    db.write(query, {"now": clock(), "up": clock.uptime_s()})
    note_uptime(db, clock)


def note_uptime(db: Database, clock: StoreClock) -> None:
    """Store the uptime, if there are jobs."""
    query = "UPDATE uptime SET seconds = ? WHERE EXISTS (SELECT 1 FROM jobs)"
    db.write(query, [clock.uptime_s()])


def identify(path: Path) -> Literal["missing", "ours", "newer", "foreign"]:
    """Identify a database file by its header. Read-only; a file without tables counts as missing.

    Source: https://www.sqlite.org/fileformat2.html#the_database_header
    """
    with path.open("rb") as file:
        header = file.read(100)
    version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
    if not header:
        return "missing"
    if not header.startswith(b"SQLite format 3\0") or application not in (0, _APPLICATION):
        return "foreign"
    if application == 0:  # from an old version, or another program
        uri = f"{path.absolute().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
                columns = {row[1] for row in db.execute("PRAGMA table_info(jobs)")}
                if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    return "missing"
        except sqlite3.Error:
            return "foreign"
        if not columns >= _COLUMNS:
            return "foreign"
    return "newer" if version > VERSION else "ours"


def page_bytes(path: Path) -> int:
    """The page size of a database, from its header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(18)[16:], "big")
    return 65536 if size == 1 else size


def wants_room(error: BaseException | None, folder: Path) -> bool:
    """Return whether an error, or one of its causes, is a disk without space or inodes.

    SQLite reports some of these as input/output errors: then the folder's disk is checked.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                return True
            if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
                return _is_full(folder)
        error = error.__cause__
    return False


def _is_full(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_BYTES or (disk.f_files > 0 == disk.f_favail)
