"""The job store: durable jobs with their files, in one folder.

SQLite (`database.py`) holds the jobs; each job has a folder for its files (`files.py`). When
`submit` returns, the job is on the disk. Every change of state is one `UPDATE ... WHERE state`, so
only the first call that ends a job takes effect. Output files are published before the job is
completed, inputs before it is accepted; its end removes the inputs. Opening the store cleans up
after a crash.

All methods may block on the disk: call them on threads. They are thread-safe.
"""

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from carpool.config import ServeSettings
from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    IdempotencyMismatch,
    JobNotFound,
    Overloaded,
    StoreFailed,
)
from carpool.jobs.clock import StoreClock
from carpool.jobs.database import (
    NAME,
    OPEN,
    Database,
    End,
    JobState,
    Record,
    note_uptime,
    record_of,
    resume_time,
    wants_room,
)
from carpool.jobs.files import JobFiles
from carpool.jobs.state_folder import ScratchFolder, StateFolder

_COLUMNS_OF_ENDS = ("error", "warnings", "timings", "skipped_steps", "settings")
_FULL_AGAIN_S = 10.0  # retry hint if too many jobs wait
_SHARE_OF_FREE = (
    7  # jobs of one API key that may wait for each place that is free: see `schedule.overload`
)
_IN_TURN = """SELECT number, row_number() OVER (PARTITION BY owner ORDER BY number) + (
    SELECT count(*) FROM jobs AS others INDEXED BY by_state
    WHERE others.owner = jobs.owner AND others.state = 'in_progress'
) AS turn FROM jobs WHERE state = 'queued'"""
"""Queued jobs with their turn: the owner's running and earlier queued jobs come before."""


class JobStore:
    """The jobs of one server, and the only writer of its folder."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        ttl_s: float = 86400.0,
        max_bytes: int = 10 << 30,
        max_waiting: int = 1024,
        clock: StoreClock | None = None,
    ) -> None:
        """Open the store, and queue the jobs that were in progress at its last end.

        Args:
            folder: created if missing; otherwise empty, or a store's. None: a store that ends with
                this process.
            ttl_s: most seconds of a job, and of its retention after its end; uptime.
            max_bytes: limit for all files: see `JobFiles`.
            max_waiting: most queued jobs; beyond it `submit` raises `Overloaded`.
            clock: the clock of this run; it continues the uptime of earlier runs.

        Raises:
            StoreFailed: the folder is unusable, or another server uses it. A folder that is not a
                complete store is not changed.
        """
        self.ttl_s, self.clock = ttl_s, clock or StoreClock()
        self._max_waiting = max_waiting
        try:
            self._scratch = ScratchFolder() if folder is None else None
        except OSError as error:
            raise StoreFailed(f"no temporary folder can be created: {error}") from error
        self.folder = self._scratch.path if self._scratch else Path(folder or "")
        self.passing = self.folder / "passing"
        with contextlib.ExitStack() as undo:
            try:
                self._claim = StateFolder(self.folder)
                undo.callback(self._claim.close)
                self._db = Database(None if folder is None else self.folder / NAME)
                undo.callback(self._db.close)
                self._files = JobFiles(self.folder, self._db, max_bytes)
                self.file, self.input = self._files.output, self._files.input
                self.journals = self._files.journals
                resume_time(self._db, self.clock)
                self._db.write("UPDATE jobs SET state = 'queued' WHERE state = 'in_progress'")
                if folder is not None:
                    self._claim.opened()
                self._files.recover()
            except (OSError, StoreFailed) as error:
                failed = StoreFailed(f"{self.folder} cannot hold jobs: {error}")
                if wants_room(error, self.folder):
                    failed = StoreFailed(f"the disk of {self.folder} is full: jobs need room there")
                    failed.wants_room = True
                raise failed from error
            undo.pop_all()

    @classmethod
    def of(cls, folder: Path | None, settings: ServeSettings) -> Self:
        """The store of a server's settings, or one in memory; raises as the class does."""
        return cls(
            folder,
            ttl_s=settings.job_ttl,
            max_bytes=settings.max_store_bytes,
            max_waiting=settings.max_queue,
        )

    def close(self) -> None:
        """Release the folder. Open jobs do not change. Idempotent."""
        if not self._db.is_closed:
            with contextlib.suppress(StoreFailed):
                note_uptime(self._db, self.clock)
            if self._db.checkpoint():
                self._claim.merged()  # before SQLite removes the log: no false alarm
        self._db.close()
        self._claim.close()
        if self._scratch:
            self._scratch.remove()

    # For clients

    def submit(
        self,
        kind: str,
        asked: Mapping[str, Any],
        work: Mapping[str, Any],
        *,
        owner: str = "",
        key: str | None = None,
        digest: str = "",
        room: Callable[[int], None] | None = None,
        inputs: Mapping[str, bytes] | None = None,
        deliveries: Mapping[str, Any] | None = None,
    ) -> Record:
        """Accept a job; it is on the disk when this returns. The same `key` returns the same job.

        Args:
            asked: the request, as shown to the client.
            work: the result of `work_of`.
            key: the client's idempotency key.
            digest: digest of the request with that key.
            room: called with the number of the owner's open jobs; raises if too many.
            inputs: files that the job needs to run, by name: see `input`.
            deliveries: webhooks and uploads after its end: see `outbox.py`.

        Raises:
            IdempotencyMismatch: an earlier request had this key and another digest.
            Overloaded: too many jobs wait.
            StoreFailed: the job was not accepted.
        """
        job_id, is_new, size = f"{kind}_{uuid.uuid4().hex}", False, 0
        find = partial(self._existing_job, owner, key, digest, room)

        def write(folder: Path) -> None:
            for name, content in (inputs or {}).items():
                (folder / name).write_bytes(content)

        try:
            if inputs and (record := find()) is not None:
                return record
            if inputs:
                size = sum(self._files.write(self._files.inputs, job_id, write).values())
            with self._db.writing() as db:
                if (record := find()) is not None:
                    return record
                [row] = db.execute(
                    "INSERT INTO jobs (id, kind, owner, state, asked, work, created_s,"
                    " created_up_s, bytes, idempotency_key, digest, deliveries, due_s)"
                    " VALUES (?, ?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING *",
                    [job_id, kind, owner, json.dumps(dict(asked)), json.dumps(dict(work)),
                     self.clock(), self.clock.uptime_s(), size, key, digest,
                     *((json.dumps(dict(deliveries)), 0) if deliveries else (None, None))],
                ).fetchall()  # fmt: skip
            is_new = True
        finally:
            if inputs and is_new:  # published after the commit: no folder without a job
                self._files.inputs.restore([job_id])
            elif inputs:
                self._files.inputs.drop(job_id)
        return record_of(row)

    def _existing_job(
        self, owner: str, key: str | None, digest: str, room: Callable[[int], None] | None
    ) -> Record | None:
        """Find the job that was submitted with this key; None if a new job may be accepted."""
        query = "SELECT * FROM jobs WHERE owner = ? AND idempotency_key = ?"
        if key is not None and (rows := self._db.read(query, [owner, key])):
            if rows[0]["digest"] != digest:
                raise IdempotencyMismatch(
                    f"Idempotency-Key {key!r} came before with another body, for job "
                    f"{rows[0]['id']}: send a new key with a new request"
                )
            return record_of(rows[0])
        if room is not None:
            room(sum(self.count_open(owner).values()))
        if (waiting := self.count_open()["queued"]) >= self._max_waiting:
            raise Overloaded(
                f"{waiting} jobs wait already: the limit is {self._max_waiting} (--max-queue)",
                retry_after_s=_FULL_AGAIN_S,
            )
        queued, free = self.count_open(owner)["queued"] if owner else 0, self._max_waiting - waiting
        if queued >= _SHARE_OF_FREE * free:
            raise Overloaded(
                f"{queued} jobs of this API key wait already, and {free} places are free: those "
                "are kept for other keys (--max-queue)",
                retry_after_s=_FULL_AGAIN_S,
            )
        return None

    def get(self, job_id: str, owner: str | None = "") -> Record:
        """One job; raises `JobNotFound` for an unknown id or another owner's job.

        Args:
            owner: None: any owner, for a signed link.
        """
        query = "SELECT * FROM jobs WHERE id = ? AND owner = coalesce(?, owner)"
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
        """A page of the owner's jobs, and whether more follow."""
        start = 1 << 62 if is_newest_first else 0
        if after is not None:
            start = self.get(after, owner).number
        query = f"""SELECT * FROM jobs INDEXED BY by_owner WHERE owner = :owner
            AND (:kind IS NULL OR kind = :kind) AND number {"<" if is_newest_first else ">"} :start
            ORDER BY number {"DESC" if is_newest_first else ""} LIMIT :limit"""
        values = {"owner": owner, "kind": kind, "start": start, "limit": limit + 1}
        rows = self._db.read(query, values)
        return [record_of(row) for row in rows[:limit]], len(rows) > limit

    def count_open(self, owner: str | None = None) -> dict[JobState, int]:
        """Count the queued and the running jobs of an owner, or of all."""
        query = """SELECT state, count(*) AS jobs FROM jobs INDEXED BY by_state
            WHERE state IN ('queued', 'in_progress') AND (:owner IS NULL OR owner = :owner)
            GROUP BY state"""
        rows = self._db.read(query, {"owner": owner})
        return dict.fromkeys(OPEN, 0) | {row["state"]: row["jobs"] for row in rows}

    def ahead_of(self, record: Record) -> int:
        """Count the queued jobs with an earlier turn."""
        query = f"""WITH turns AS ({_IN_TURN}) SELECT count(*) FROM turns
            JOIN turns AS own ON own.number = ?
            WHERE (turns.turn, turns.number) < (own.turn, own.number)"""
        return int(self._db.read(query, [record.number])[0][0])

    def remove(self, job_id: str, owner: str = "") -> None:
        """Delete a job and its files, in any state."""
        self._files.remove([self.get(job_id, owner).id])

    # For the runner

    def take(self, count: int) -> list[Record]:
        """Start the next queued jobs: owners take turns."""
        query = f"""UPDATE jobs SET state = 'in_progress', started_s = coalesce(started_s, ?)
            WHERE number IN (SELECT number FROM ({_IN_TURN}) ORDER BY turn, number LIMIT ?)
            RETURNING *"""
        rows = self._db.write(query, [self.clock(), count])
        return sorted(map(record_of, rows), key=lambda record: record.number)

    def requeue(self, job_id: str, *, progress: int = 0) -> None:
        """Return a running job to its old place in the queue."""
        query = """UPDATE jobs SET state = 'queued', progress = max(progress, ?)
            WHERE id = ? AND state = 'in_progress'"""
        self._db.write(query, [progress, job_id])

    def note_progress(self, percents: Mapping[str, int]) -> None:
        """Store the progress of jobs, so clients never see it fall."""
        query = "UPDATE jobs SET progress = max(progress, ?) WHERE id = ? AND state = 'in_progress'"
        with self._db.writing() as db:
            db.executemany(query, [(percent, job_id) for job_id, percent in percents.items()])

    def complete(
        self,
        job_id: str,
        write: Callable[[Path], object],
        *,
        keep: Sequence[str] = (),
        **facts: Any,
    ) -> bool:
        """Complete a running job with the files that `write` puts into an empty folder.

        Args:
            keep: inputs to keep as output files.
            facts: `warnings`, `timings`, `skipped_steps` and `settings` of its record.

        Returns:
            Whether this call ended the job; if not, its files are deleted.

        Raises:
            StoreFailed: the files do not fit, or the disk fails; the job stays open.
        """

        def write_all(folder: Path) -> None:
            write(folder)
            for name in keep:
                shutil.copyfile(places.inputs.path(job_id) / name, folder / name)

        is_ours, places = False, self._files
        try:
            files = places.write(places.outputs, job_id, write_all)
            places.outputs.publish(job_id)
            is_ours = self._end(job_id, "completed", 100, files=files, **facts)
        finally:
            if is_ours:
                places.drop(job_id, places.inputs)
            else:
                places.outputs.drop(job_id)
        return is_ours

    def end(self, job_id: str, state: End, error: CarpoolError, *, progress: int = 0) -> bool:
        """End an open job without files; returns whether this call ended it."""
        if is_ours := self._end(job_id, state, progress, error=error.body):
            self._files.drop(job_id, self._files.inputs)
        return is_ours

    def _end(
        self,
        job_id: str,
        state: JobState,
        progress: int,
        *,
        files: Mapping[str, int] | None = None,
        **columns: Any,
    ) -> bool:
        """End a job; only a running job can be completed."""
        query = """UPDATE jobs SET state = :state, progress = max(progress, :progress),
            files = :files, bytes = :bytes, error = :error, warnings = :warnings,
            timings = :timings, skipped_steps = :skipped_steps, settings = :settings,
            ended_s = :now, ended_up_s = :up WHERE id = :id
            AND (state = 'in_progress' OR (state = 'queued' AND :state != 'completed'))
            RETURNING id"""
        columns = dict.fromkeys(_COLUMNS_OF_ENDS) | columns
        values: dict[str, Any] = {
            **{name: json.dumps(value) if value else None for name, value in columns.items()},
            **{"id": job_id, "state": state, "progress": progress},
            **{"files": json.dumps(files or {}), "bytes": sum((files or {}).values())},
            **{"now": self.clock(), "up": self.clock.uptime_s()},
        }
        return bool(self._db.write(query, values))

    def deliveries_due(self) -> list[Record]:
        """Ended jobs with webhooks or uploads to be tried, the earliest first."""
        query = "SELECT * FROM jobs WHERE due_s IS NOT NULL AND ended_s IS NOT NULL"
        return [record_of(row) for row in self._db.read(f"{query} ORDER BY due_s LIMIT 32")]

    def note_deliveries(
        self, job_id: str, deliveries: Mapping[str, Any], due_s: float | None
    ) -> None:
        query = "UPDATE jobs SET deliveries = ?, due_s = ? WHERE id = ?"
        self._db.write(query, [json.dumps(dict(deliveries)), due_s, job_id])

    def tidy(self) -> list[Record]:
        """Expire and return jobs that took too long; delete jobs after their retention."""
        note_uptime(self._db, self.clock)
        old_s = self.clock.uptime_s() - self.ttl_s
        query = "SELECT * FROM jobs WHERE state IN ('queued', 'in_progress') AND created_up_s < ?"
        late = self._db.read(query, [old_s])
        error = DeadlineExceeded(f"the job did not end within {self.ttl_s:g} s (--job-ttl)")
        expired = [record_of(row) for row in late if self.end(row["id"], "expired", error)]
        expired_rows = self._db.read("SELECT id FROM jobs WHERE ended_up_s < ?", [old_s])
        if expired_rows:
            self._files.remove([row["id"] for row in expired_rows])
        return expired

    def expires_s(self, record: Record) -> float | None:
        """The time at which an ended job is deleted, in Unix seconds; None for an open job."""
        if record.ended_s is None or record.ended_up_s is None:
            return None
        offset_s = self.clock() - self.clock.uptime_s()
        away_s = offset_s - (record.ended_s - record.ended_up_s)  # time outside of uptime
        return record.ended_s + self.ttl_s + round(away_s)
