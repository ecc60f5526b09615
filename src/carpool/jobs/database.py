"""The tables of the store of jobs: opened, locked, written in transactions, read as `Record`s.

The only place that imports sqlite3. WAL with `synchronous = FULL`: what a transaction wrote is on
the disk when it has ended. One connection, which all threads share, one statement at a time.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from carpool.errors import StoreFailed

State = Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
End = Literal["failed", "cancelled", "expired"]
OPEN: tuple[State, ...] = ("queued", "in_progress")
VERSION = 1  # of the tables
Values = Sequence[Any] | dict[str, Any]

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
  losses INTEGER NOT NULL DEFAULT 0,
  created_s REAL NOT NULL,
  started_s REAL,
  ended_s REAL,
  created_up_s REAL,  -- uptime; NULL in rows of older versions until the store is opened
  ended_up_s REAL,
  error TEXT,  -- JSON
  files TEXT NOT NULL DEFAULT '{}',  -- JSON: bytes by name
  bytes INTEGER NOT NULL DEFAULT 0,
  idempotency_key TEXT,
  digest TEXT,
  UNIQUE (owner, idempotency_key)
);
CREATE INDEX by_state ON jobs (state, number);
"""
_LATER = """
CREATE INDEX IF NOT EXISTS by_size ON jobs (state, ended_s, number, bytes, id) WHERE bytes > 0;
CREATE INDEX IF NOT EXISTS by_age ON jobs (ended_up_s);
DROP INDEX IF EXISTS by_end;
CREATE TABLE IF NOT EXISTS uptime (seconds REAL NOT NULL);
INSERT INTO uptime SELECT 0.0 WHERE NOT EXISTS (SELECT 1 FROM uptime);
"""  # what older files of this version lack
_LATER_COLUMNS = ("created_up_s", "ended_up_s")


@dataclass(frozen=True, slots=True)
class Record:
    """A job as the store keeps it. Times are Unix seconds, or uptime: see `clock.py`."""

    number: int
    id: str
    kind: str  # "video", "image"
    owner: str  # whose it is: nobody else sees it
    state: State
    asked: dict[str, Any]
    work: dict[str, Any]  # empty: it cannot be read any more
    progress: int  # percent; never falls, not even when the job is run again
    losses: int  # workers that died while they ran it
    created_s: float
    started_s: float | None
    ended_s: float | None
    created_up_s: float
    ended_up_s: float | None
    error: dict[str, Any] | None
    files: dict[str, int] = field(hash=False)  # bytes by name

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


class Database:
    """The jobs of one folder, or of none; the only one that writes them."""

    def __init__(self, folder: Path, *, in_memory: bool) -> None:
        """Take the folder, and make the tables if there are none.

        Raises:
            OSError: it cannot be used, or another process uses it.
        """
        self._lock = threading.RLock()
        self._only_one: int | None = _locked(folder)
        try:
            self._db = _opened(":memory:" if in_memory else folder / "jobs.sqlite")
        except (OSError, sqlite3.Error) as error:
            os.close(self._only_one)
            raise OSError(str(error)) from error

    @property
    def is_closed(self) -> bool:
        return self._only_one is None

    def close(self) -> None:
        with self._lock:
            self._db.close()
            if self._only_one is not None:
                os.close(self._only_one)
                self._only_one = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is on the disk afterwards, or nothing of it."""
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
                with contextlib.suppress(sqlite3.Error):  # where the disk is full, this makes room
                    self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                raise StoreFailed("the store of jobs cannot be written just now") from error

    def write(self, query: str, values: Values = ()) -> list[sqlite3.Row]:
        """One statement, as a transaction of its own; gives what it RETURNs."""
        with self.writing() as db:
            return db.execute(query, values).fetchall()

    def read(self, query: str, values: Values = ()) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise StoreFailed("the store of jobs cannot be read just now") from error


def _opened(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cache_size = -512")  # KiB: the system's own cache has the rest
    [version] = db.execute("PRAGMA user_version").fetchone()
    if version == 0:
        db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT")
    elif version != VERSION:
        db.close()
        raise OSError(
            f"its tables are of version {version}, this Carpool reads {VERSION}: give another "
            "--state-dir"
        )
    columns = {row["name"] for row in db.execute("PRAGMA table_info(jobs)")}
    for name in _LATER_COLUMNS:
        if name not in columns:
            db.execute(f"ALTER TABLE jobs ADD COLUMN {name} REAL")
    db.executescript(f"BEGIN; {_LATER} COMMIT")
    return db


def _locked(folder: Path) -> int:
    """Take the folder for this process; an open descriptor holds it until the process is gone."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OSError("another server uses it: give each its own --state-dir") from None
    return descriptor


def record_of(row: sqlite3.Row) -> Record:
    """A row as a record."""
    return Record(
        number=row["number"],
        id=row["id"],
        kind=row["kind"],
        owner=row["owner"],
        state=row["state"],
        asked=_loads(row["asked"]),
        work=_loads(row["work"]),
        progress=row["progress"],
        losses=row["losses"],
        created_s=row["created_s"],
        started_s=row["started_s"],
        ended_s=row["ended_s"],
        created_up_s=row["created_up_s"],
        ended_up_s=row["ended_up_s"],
        error=_loads(row["error"]) if row["error"] else None,
        files=_loads(row["files"]),
    )


def _loads(text: str) -> dict[str, Any]:
    """A JSON object; an empty one for a row that the disk has spoiled."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
