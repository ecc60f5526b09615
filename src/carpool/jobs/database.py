"""The tables of the store of jobs: opened, written in transactions, read as `Record`s.

The only place that imports sqlite3. WAL with `synchronous = FULL`: what a transaction wrote is on
the disk when it has ended. One connection, which all threads share, one statement at a time.
"""

import contextlib
import json
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
NAME = "jobs.sqlite"
VERSION = 1  # of the tables
_APPLICATION = 0x43504F4C  # "CPOL": by which SQLite's header names whose file it is
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
_COLUMNS = {"id", "kind", "owner", "state", "asked", "work", "files"}  # of any version
_LATER_COLUMNS = ("created_up_s", "ended_up_s")

Found = Literal["missing", "ours", "newer", "foreign"]


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

    def __init__(self, path: Path | None) -> None:
        """Open a file, and make the tables if there are none; None: in memory.

        Raises:
            OSError: it cannot be used, or is damaged.
        """
        self._lock, self.is_closed = threading.RLock(), False
        try:
            self._db = _opened(path or ":memory:")
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error
        except sqlite3.DatabaseError as error:
            raise OSError(f"{NAME} is damaged ({error}): restore it from a backup") from error

    def flush(self) -> bool:
        """Bring all that the log has into the file; whether there was room for it."""
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


def look(path: Path) -> Found:
    """Whose file this is. Reads it only; a file without tables counts as missing.

    Source: https://www.sqlite.org/fileformat2.html#the_database_header
    """
    with path.open("rb") as file:
        header = file.read(100)
    if not header:
        return "missing"
    if not header.startswith(b"SQLite format 3\0"):
        return "foreign"
    version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
    if application == 0:  # of a version that did not say so, or somebody's
        try:
            with contextlib.closing(
                sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            ) as db:
                columns = {row[1] for row in db.execute("PRAGMA table_info(jobs)")}
                is_empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        except sqlite3.Error:
            return "foreign"
        if is_empty or not columns >= _COLUMNS:
            return "missing" if is_empty else "foreign"
    elif application != _APPLICATION:
        return "foreign"
    return "newer" if version > VERSION else "ours"


def page_bytes(path: Path) -> int:
    """The page size of a database, from its header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(18)[16:], "big")
    return 65536 if size == 1 else size


def _opened(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.row_factory = sqlite3.Row
        if (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(problem.splitlines()[-1][:80])
        [version] = db.execute("PRAGMA user_version").fetchone()
        if version == 0:  # before there is a log: so the file itself says whose it is
            name = f"PRAGMA user_version = {VERSION}; PRAGMA application_id = {_APPLICATION}"
            db.executescript(f"BEGIN; {_TABLES} {name}; COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -512")  # KiB: the system's own cache has the rest
        if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            db.execute(f"PRAGMA application_id = {_APPLICATION}")
        columns = {row["name"] for row in db.execute("PRAGMA table_info(jobs)")}
        for name in _LATER_COLUMNS:
            if name not in columns:
                db.execute(f"ALTER TABLE jobs ADD COLUMN {name} REAL")
        db.executescript(f"BEGIN; {_LATER} COMMIT")
    except BaseException:
        db.close()
        raise
    return db


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
