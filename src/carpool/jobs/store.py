"""Jobs that outlive the process: what was asked, what became of it, where its files are.

SQLite (`database.py`) holds the jobs, a folder beside it their files. A job that `submit` has
returned is on the disk, and every change of state is one `UPDATE ... WHERE state`: whoever ends a
job first has ended it for good. The files of a job appear all at once, by renaming their folder,
before the job is completed; folders of no completed job are swept when the store is opened.

Everything here may wait for the disk: call it off the event loop, from any thread. Nothing here
knows of HTTP, workers or pictures.
"""

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    IdempotencyMismatch,
    JobNotFound,
    Overloaded,
    StoreFailed,
)
from carpool.jobs.database import Database, End, Record, record_of

_FULL_AGAIN_S = 10.0  # when to come again if too many jobs wait


class JobStore:
    """The jobs of one server: the only writer of its folder, or in memory where there is none."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        ttl_s: float = 86400.0,
        max_bytes: int = 10 << 30,
        max_waiting: int = 1024,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the store, and queue again what was in progress when it was last left.

        Args:
            folder: made if it is missing.
            ttl_s: how long a job may take to end, and is kept after that.
            max_bytes: of all files; older jobs go to make room.
            max_waiting: queued jobs; beyond it `submit` raises `Overloaded`.
            clock: Unix seconds; may jump.

        Raises:
            StoreFailed: the folder cannot be used, or another server uses it.
        """
        self.ttl_s, self.clock = ttl_s, clock
        self._max_bytes, self._max_waiting = max_bytes, max_waiting
        self._temporary = tempfile.TemporaryDirectory("-carpool") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else folder or "")
        self._files, self.passing = self.folder / "files", self.folder / "passing"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.mkdir(exist_ok=True)
            self._db = Database(self.folder, in_memory=folder is None)
        except OSError as error:
            raise StoreFailed(f"{self.folder} cannot hold jobs: {error}") from error
        try:
            self._db.write("UPDATE jobs SET state = 'queued' WHERE state = 'in_progress'")
            self._sweep()
            shutil.rmtree(self.passing, ignore_errors=True)  # outputs on their way when it crashed
            self.passing.mkdir()
        except (OSError, StoreFailed) as error:
            self.close()
            raise StoreFailed(f"{self.folder} cannot hold jobs: {error}") from error

    def close(self) -> None:
        """Let go of the folder. What is open stays as it is."""
        self._db.close()
        if self._temporary:
            self._temporary.cleanup()

    # What clients ask

    def submit(
        self,
        kind: str,
        asked: Mapping[str, Any],
        work: Mapping[str, Any],
        *,
        owner: str = "",
        key: str | None = None,
        digest: str = "",
    ) -> tuple[Record, bool]:
        """Accept a job; it is on the disk when this returns.

        Args:
            key: the client's own: the same one again gives the same job.
            digest: of what the client sent with that key.

        Returns:
            The job, and whether it is new.

        Raises:
            IdempotencyMismatch: this key came before with another digest.
            Overloaded: too many jobs wait already.
            StoreFailed: nothing was accepted.
        """
        with self._db.writing() as db:
            if key is not None:
                found = "SELECT * FROM jobs WHERE owner = ? AND idempotency_key = ?"
                if (row := db.execute(found, [owner, key]).fetchone()) is not None:
                    if row["digest"] != digest:
                        raise IdempotencyMismatch(
                            f"Idempotency-Key {key!r} came before with another body, for job "
                            f"{row['id']}: send a new key with a new request"
                        )
                    return record_of(row), False
            [waiting] = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if waiting >= self._max_waiting:
                raise Overloaded(
                    f"{waiting} jobs wait already, the most is {self._max_waiting} (--max-queue)",
                    retry_after_s=_FULL_AGAIN_S,
                )
            [row] = db.execute(
                "INSERT INTO jobs (id, kind, owner, state, asked, work, created_s,"
                " idempotency_key, digest) VALUES (?, ?, ?, 'queued', ?, ?, ?, ?, ?) RETURNING *",
                [f"{kind}_{uuid.uuid4().hex}", kind, owner, json.dumps(dict(asked)),
                 json.dumps(dict(work)), self.clock(), key, digest],
            ).fetchall()  # fmt: skip
        return record_of(row), True

    def get(self, job_id: str, owner: str = "") -> Record:
        """One job.

        Raises:
            JobNotFound: there is none of this id, or it is somebody else's.
        """
        query = "SELECT * FROM jobs WHERE id = ? AND owner = ?"
        if not (rows := self._db.read(query, [job_id, owner])):
            raise JobNotFound(
                f"there is no job {job_id[:80]!r}: never accepted, deleted, or no longer kept"
            )
        return record_of(rows[0])

    def page(
        self,
        owner: str = "",
        *,
        kind: str | None = None,
        after: str | None = None,
        limit: int = 20,
        is_newest_first: bool = True,
    ) -> tuple[list[Record], bool]:
        """Some of the owner's jobs, and whether there are more behind them.

        Raises:
            JobNotFound: there is no job `after`.
        """
        start = None if after is None else self.get(after, owner).number
        query = f"""SELECT * FROM jobs WHERE owner = :owner AND (:kind IS NULL OR kind = :kind)
            AND (:start IS NULL OR number {"<" if is_newest_first else ">"} :start)
            ORDER BY number {"DESC" if is_newest_first else ""} LIMIT :limit"""
        rows = self._db.read(
            query, {"owner": owner, "kind": kind, "start": start, "limit": limit + 1}
        )
        return [record_of(row) for row in rows[:limit]], len(rows) > limit

    def ahead_of(self, record: Record) -> int:
        """How many queued jobs were accepted before this one."""
        query = "SELECT count(*) FROM jobs WHERE state = 'queued' AND number < ?"
        return int(self._db.read(query, [record.number])[0][0])

    def file(self, record: Record, name: str) -> Path | None:
        """Where a completed job's file lies; None if it has none of this name."""
        path = self._files / record.id / name
        return path if name in record.files and path.is_file() else None

    def remove(self, job_id: str, owner: str = "") -> None:
        """Forget a job and its files, whatever state it is in.

        Raises:
            JobNotFound: as for `get`.
        """
        self._forget([self.get(job_id, owner).id])

    # What runs them

    def take(self, most: int) -> list[Record]:
        """Put the oldest queued jobs in progress."""
        query = """UPDATE jobs SET state = 'in_progress', started_s = coalesce(started_s, ?)
            WHERE number IN (SELECT number FROM jobs WHERE state = 'queued' ORDER BY number LIMIT ?)
            RETURNING *"""
        rows = self._db.write(query, [self.clock(), most])
        return sorted(map(record_of, rows), key=lambda record: record.number)

    def requeue(self, job_id: str, *, is_lost: bool = False, progress: int = 0) -> None:
        """Put a job in progress back into the line, at its old place.

        Args:
            is_lost: its worker died.
            progress: how far it had come, percent; it is not to fall for those who look.
        """
        query = """UPDATE jobs SET state = 'queued', losses = losses + ?,
            progress = max(progress, ?) WHERE id = ? AND state = 'in_progress'"""
        self._db.write(query, [int(is_lost), progress, job_id])

    def note_progress(self, percents: Mapping[str, int]) -> None:
        """Remember how far jobs have come, so that what clients see does not fall."""
        query = "UPDATE jobs SET progress = max(progress, ?) WHERE id = ? AND state = 'in_progress'"
        with self._db.writing() as db:
            db.executemany(query, [(percent, job_id) for job_id, percent in percents.items()])

    def complete(self, job_id: str, write: Callable[[Path], object]) -> bool:
        """End a job well, with files.

        Args:
            write: puts them into the empty folder that it is given.

        Returns:
            Whether it was this call that ended it; if not, the files are gone.

        Raises:
            StoreFailed: the files do not fit, or the disk refuses them; the job is still open.
        """
        part, whole = self._files / f"{job_id}.part", self._files / job_id
        query = """UPDATE jobs SET state = 'completed', progress = 100, ended_s = ?, files = ?,
            bytes = ? WHERE id = ? AND state = 'in_progress' RETURNING id"""
        is_ours = False
        try:
            for old in (part, whole):
                shutil.rmtree(old, ignore_errors=True)
            part.mkdir()
            write(part)
            files = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
            total = sum(files.values())
            self._make_room(total)
            for path in (*part.iterdir(), part):
                _sync(path)
            os.rename(part, whole)
            _sync(self._files)
            is_ours = bool(self._db.write(query, [self.clock(), json.dumps(files), total, job_id]))
        except OSError as error:
            raise StoreFailed(f"the files could not be stored: {error}") from error
        finally:
            if not is_ours:
                for old in (part, whole):
                    shutil.rmtree(old, ignore_errors=True)
        return is_ours

    def end(self, job_id: str, state: End, error: CarpoolError, *, progress: int = 0) -> bool:
        """End a job without files. Says whether it was this call that ended it."""
        told = {"code": error.code, "message": error.message, "param": error.param}
        told["type"] = error.type
        query = """UPDATE jobs SET state = ?, ended_s = ?, error = ?, progress = max(progress, ?)
            WHERE id = ? AND state IN ('queued', 'in_progress') RETURNING id"""
        values = [state, self.clock(), json.dumps(told), progress, job_id]
        return bool(self._db.write(query, values))

    def tidy(self) -> list[str]:
        """Expire jobs that took too long, forget those that ended long ago.

        Returns:
            The ids of those that expired: whatever runs them may stop.
        """
        old_s = self.clock() - self.ttl_s
        late = self._db.read(
            "SELECT id FROM jobs WHERE state IN ('queued', 'in_progress') AND created_s < ?",
            [old_s],
        )
        error = DeadlineExceeded(f"the job did not end within {self.ttl_s:g} s (--job-ttl)")
        expired = [row["id"] for row in late if self.end(row["id"], "expired", error)]
        gone = self._db.read("SELECT id FROM jobs WHERE ended_s < ?", [old_s])
        self._forget([row["id"] for row in gone])
        return expired

    # Inside

    def _forget(self, job_ids: Sequence[str]) -> None:
        with self._db.writing() as db:
            db.executemany("DELETE FROM jobs WHERE id = ?", [[job_id] for job_id in job_ids])
        for job_id in job_ids:
            shutil.rmtree(self._files / job_id, ignore_errors=True)

    def _make_room(self, needed: int) -> None:
        if needed > self._max_bytes:
            raise OSError(f"{needed} bytes, the most is {self._max_bytes} (--max-store-bytes)")
        rows = self._db.read("SELECT id, bytes FROM jobs WHERE bytes > 0 ORDER BY ended_s, number")
        excess = sum(row["bytes"] for row in rows) + needed - self._max_bytes
        for row in rows:
            if excess <= 0:
                return
            self._forget([row["id"]])
            excess -= row["bytes"]

    def _sweep(self) -> None:
        """Remove the files of no completed job: it was not, when the server was killed."""
        kept = {row["id"] for row in self._db.read("SELECT id FROM jobs WHERE state = 'completed'")}
        for path in self._files.iterdir():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
