"""The files of all jobs of a store: inputs, outputs and journals.

The files of a job are written before the database says that they are there, and removed after it
says that they are not; what a crash left half done is settled by `recover`.
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
_PASSING = re.compile(r"tmp[a-z0-9_]{8}\.rgb")  # large outputs, on their way from the worker


class JobFiles:
    """The folders of a store; old outputs are deleted to make room for new ones."""

    def __init__(self, folder: Path, db: Database, max_bytes: int) -> None:
        """Open the folders.

        Args:
            max_bytes: of all files; the oldest completed jobs are removed to make room. Half of
                it is for inputs of open jobs.
        """
        self._folder, self._db, self._max_bytes = folder, db, max_bytes
        self.outputs = FileStore(folder / "files")
        self.inputs = FileStore(folder / "inputs")
        self.journals = FileStore(folder / "journals")  # open jobs' journals: `JobJournals`

    def output(self, record: Record, name: str) -> Path | None:
        """The path of a completed job's file; None if it has none of this name."""
        if name not in record.files or name != Path(name).name:  # a damaged row may say anything
            return None
        path = self.outputs.path(record.id) / name
        return path if path.is_file() else None

    def input(self, job_id: str, name: str) -> bytes | None:
        """An input of a job; None once it is removed, when the job ends."""
        for place in (self.inputs.path, self.inputs.part, self.outputs.path):  # where it is kept
            with contextlib.suppress(FileNotFoundError):
                return (place(job_id) / name).read_bytes()
        return None

    def write(
        self, place: FileStore, job_id: str, write: Callable[[Path], object]
    ) -> dict[str, int]:
        """Write the files of a job to the disk, if there is room; gives their bytes by name."""
        try:
            files = place.write(job_id, write)
            # inputs take half at most: what becomes of them has to find room, too
            limit = self._max_bytes // 2 if place is self.inputs else self._max_bytes
            for victim in self._too_many(job_id, sum(files.values()), limit):
                self.remove([victim])
            place.flush(job_id)
        except OSError as error:
            raise StoreFailed(f"the files could not be stored: {reason(error)}") from error
        return files

    def _too_many(self, job_id: str, size: int, limit: int) -> Iterator[str]:
        """The completed jobs to delete, the oldest first, until there is room for another's files.

        Each has to be deleted before the next one is asked for.

        Args:
            size: bytes of the files of `job_id`.
            limit: bytes that these and the files of open jobs may take.

        Raises:
            OSError: open jobs hold too much.
        """
        query = """SELECT state, sum(bytes) AS bytes FROM jobs WHERE bytes > 0 AND id != ?
            GROUP BY state"""
        sizes = {row["state"]: row["bytes"] for row in self._db.read(query, [job_id])}
        open_bytes = sum(sizes.get(state, 0) for state in OPEN)
        if open_bytes + size > limit:
            rest = f", {open_bytes} more are held by jobs that have not ended" if open_bytes else ""
            raise OSError(f"{size} bytes{rest}, the most is {limit} (--max-store-bytes)")
        excess = sum(sizes.values()) + size - self._max_bytes
        query = """SELECT id, bytes FROM jobs WHERE bytes > 0 AND state = 'completed' AND id != ?
            ORDER BY ended_s, number LIMIT 1"""
        while excess > 0 and (victim := self._db.read(query, [job_id])):
            yield victim[0]["id"]
            excess -= victim[0]["bytes"]

    def remove(self, job_ids: Sequence[str]) -> None:
        """Delete jobs with their files: all of one, or nothing, also if a crash interrupts."""
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
        """Remove files of a job that has ended, and its journals."""
        for place in (*places, self.journals):
            place.drop(job_id)

    def recover(self) -> None:
        """Settle what was half done when the last process was killed."""
        states = {row["id"]: row["state"] for row in self._db.read("SELECT id, state FROM jobs")}
        unknown = [
            *self.outputs.recover(states, having=ENDED[:1], without=ENDED[1:]),
            *self.inputs.recover(states, having=OPEN, without=ENDED),
            *self.journals.recover(states, having=(), without=ENDED),
        ]
        if unknown:
            log.warning(
                "%d folders in %s belong to jobs that %s does not know, such as %s: it may be "
                "older than they are. They stay; remove them by hand if they are not wanted",
                len(unknown), self._folder, NAME, unknown[0],
            )  # fmt: skip
        for path in (self._folder / "passing").iterdir():
            if _PASSING.fullmatch(path.name):
                path.unlink()
