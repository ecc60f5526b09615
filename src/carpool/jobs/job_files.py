"""The files of all jobs of a store: inputs, outputs and journals.

Files are written before the database lists them, and removed after it stops listing them;
`recover` cleans up after a crash.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from carpool.errors import StoreFailed, reason
from carpool.jobs.database import NAME, OPEN, Database, JobState, Record
from carpool.jobs.file_store import FileStore

log = logging.getLogger("carpool")
ENDED: tuple[JobState, ...] = ("completed", "failed", "cancelled", "expired")
_PASSING = re.compile(r"tmp[a-z0-9_]{8}\.rgb")  # temporary files: large outputs from the worker


class JobFiles:
    """The folders of a store; old outputs are deleted to make room for new ones."""

    def __init__(self, folder: Path, db: Database, max_bytes: int) -> None:
        """Open the folders.

        Args:
            max_bytes: limit for all files; the oldest completed jobs are removed to make room.
                Inputs of open jobs may take half of it.
        """
        self._folder, self._db, self._max_bytes = folder, db, max_bytes
        self.outputs = FileStore(folder / "files")
        self.inputs = FileStore(folder / "inputs")
        self.journals = FileStore(folder / "journals")  # open jobs' journals: `JobJournals`

    def output(self, record: Record, name: str) -> Path | None:
        """The path of a completed job's file; None if it has no file of this name."""
        if name not in record.files or name != Path(name).name:  # a damaged row may hold any name
            return None
        path = self.outputs.path(record.id) / name
        return path if path.is_file() else None

    def input(self, job_id: str, name: str) -> bytes | None:
        """An input of a job; None after the job's end, when inputs are removed."""
        for place in (self.inputs.path, self.inputs.part, self.outputs.path):  # possible places
            with contextlib.suppress(FileNotFoundError):
                return (place(job_id) / name).read_bytes()
        return None

    def write(
        self, place: FileStore, job_id: str, write: Callable[[Path], object]
    ) -> dict[str, int]:
        """Write the files of a job, if there is room; returns their sizes by name."""
        try:
            files = place.write(job_id, write)
            # at most half for inputs: their outputs need room too
            limit = self._max_bytes // 2 if place is self.inputs else self._max_bytes
            for victim in self._too_many(job_id, sum(files.values()), limit):
                self.remove([victim])
            place.flush(job_id)
        except OSError as error:
            raise StoreFailed(f"the files could not be stored: {reason(error)}") from error
        return files

    def _too_many(self, job_id: str, size: int, limit: int) -> Iterator[str]:
        """Yield the oldest completed jobs to delete until the files of another job fit.

        The caller deletes each job before it takes the next.

        Args:
            size: bytes of the files of `job_id`.
            limit: most bytes of these files and the files of open jobs.

        Raises:
            OSError: open jobs hold too many bytes.
        """
        query = """SELECT state, sum(bytes) AS bytes FROM jobs WHERE bytes > 0 AND id != ?
            GROUP BY state"""
        sizes = {row["state"]: row["bytes"] for row in self._db.read(query, [job_id])}
        open_bytes = sum(sizes.get(state, 0) for state in OPEN)
        if open_bytes + size > limit:
            rest = f", {open_bytes} more are held by jobs that have not ended" if open_bytes else ""
            raise OSError(f"{size} bytes{rest}: the limit is {limit} (--max-store-bytes)")
        excess = sum(sizes.values()) + size - self._max_bytes
        query = """SELECT id, bytes FROM jobs WHERE bytes > 0 AND state = 'completed' AND id != ?
            ORDER BY ended_s, number LIMIT 1"""
        while excess > 0 and (victim := self._db.read(query, [job_id])):
            yield victim[0]["id"]
            excess -= victim[0]["bytes"]

    def remove(self, job_ids: Sequence[str]) -> None:
        """Delete jobs with their files: each job completely or not at all, even after a crash."""
        places = (self.outputs, self.inputs)
        try:
            for place in places:
                place.bury(job_ids)
            with self._db.writing() as db:
                db.executemany("DELETE FROM jobs WHERE id = ?", [[job_id] for job_id in job_ids])
        except (OSError, StoreFailed) as error:
            for place in places:
                place.restore(job_ids)
            raise StoreFailed(f"the job could not be removed: {reason(error)}") from error
        for job_id in job_ids:
            self.drop(job_id, *places)

    def drop(self, job_id: str, *places: FileStore) -> None:
        """Remove files and journals of an ended job."""
        for place in (*places, self.journals):
            place.drop(job_id)

    def recover(self) -> None:
        """Clean up after a killed process."""
        states = {row["id"]: row["state"] for row in self._db.read("SELECT id, state FROM jobs")}
        unknown = [
            *self.outputs.recover(states, having=ENDED[:1], without=ENDED[1:]),
            *self.inputs.recover(states, having=OPEN, without=ENDED),
            *self.journals.recover(states, having=(), without=ENDED),
        ]
        if unknown:
            log.warning(
                "%d folders in %s belong to jobs that %s does not know, such as %s: the database "
                "may be older than the folders. They stay; delete them by hand if unwanted",
                len(unknown), self._folder, NAME, unknown[0],
            )  # fmt: skip
        for path in (self._folder / "passing").iterdir():
            if _PASSING.fullmatch(path.name):
                path.unlink()
