"""The files of all jobs of a store: a folder for each job's inputs, outputs and journal.

A folder is written as `ID.part`, flushed to the disk, then renamed to `ID`. Removal first renames
it back to `ID.part`, its tombstone. Files are written before the database lists them, and removed
after it stops listing them; `recover` completes or reverts the unfinished steps of a killed
process. Only folders named as above are removed, and never through a symbolic link.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from carpool.errors import StoreFailed, reason
from carpool.jobs.database import NAME, OPEN, Database, JobState, Record

log = logging.getLogger("carpool")
ENDED: tuple[JobState, ...] = ("completed", "failed", "cancelled", "expired")
_PART = ".part"
_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")
_PASSING = re.compile(r"tmp[a-z0-9_]{8}\.rgb")  # temporary files: large outputs from the worker


class JobFolders:
    """A folder for each job, published and removed atomically by a rename."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(exist_ok=True)

    def path(self, job_id: str) -> Path:
        """The folder of a job's files, if it has any.

        Raises:
            FileNotFoundError: `job_id` is not a valid id.
        """
        if not _ID.fullmatch(job_id):  # a damaged row may hold it
            raise FileNotFoundError(f"{job_id[:80]!r} is no id of a job")
        return self._path / job_id

    def part(self, job_id: str) -> Path:
        """The folder of files before publication and during removal."""
        return self.path(job_id).with_suffix(_PART)

    def write(self, job_id: str, write: Callable[[Path], object]) -> dict[str, int]:
        """Let `write` put files into an unpublished folder; returns their sizes by name."""
        self.drop(job_id)
        part = self.part(job_id)
        part.mkdir()
        write(part)
        return {path.name: path.stat().st_size for path in sorted(part.iterdir())}

    def flush(self, job_id: str) -> None:
        """Flush an unpublished folder to the disk."""
        part = self.part(job_id)
        for path in (*part.iterdir(), part, self._path):
            _sync(path)

    def publish(self, job_id: str) -> None:
        """Make a flushed folder visible and durable."""
        os.rename(self.part(job_id), self.path(job_id))
        _sync(self._path)

    def bury(self, job_ids: Iterable[str]) -> None:
        """Begin to remove folders: `drop` completes the removal, `restore` reverts it."""
        for job_id in job_ids:
            with suppress(FileNotFoundError):
                os.rename(self.path(job_id), self.part(job_id))
        _sync(self._path)

    def restore(self, job_ids: Iterable[str]) -> None:
        """Make folders visible again; if the disk refuses, a restart does it."""
        for job_id in job_ids:
            with suppress(OSError):
                os.rename(self.part(job_id), self.path(job_id))

    def drop(self, job_id: str) -> None:
        """Remove all files of a job, published or not."""
        with suppress(FileNotFoundError):
            for path in (self.part(job_id), self.path(job_id)):
                shutil.rmtree(path, ignore_errors=True)

    def recover(
        self, states: Mapping[str, str], *, having: Collection[str], without: Collection[str]
    ) -> list[str]:
        """Make the folders match the states of jobs after a crash.

        Args:
            states: the states of all known jobs, by id.
            having: states in which a job must have a folder: its tombstone is restored.
            without: states in which a job has no folder: it is removed. Other states allow both.

        Returns:
            Ids of folders of unknown jobs, which stay: they may be newer than the database.
        """
        unknown = []
        for entry in sorted(os.scandir(self._path), key=lambda entry: entry.name):
            job_id = entry.name.removesuffix(_PART)
            if not _ID.fullmatch(job_id) or not entry.is_dir(follow_symlinks=False):
                continue
            state = states.get(job_id)
            if entry.name != job_id:
                if state in having and not self.path(job_id).exists():
                    self.restore([job_id])
                else:
                    shutil.rmtree(entry.path, ignore_errors=True)
            elif state is None:
                unknown.append(job_id)
            elif state in without:
                self.drop(job_id)
        return unknown


class JobFiles:
    """The folders of a store; old outputs are deleted to make room for new ones."""

    def __init__(self, folder: Path, db: Database, max_bytes: int) -> None:
        """Open the folders.

        Args:
            max_bytes: limit for all files; the oldest completed jobs are removed to make room.
                Inputs of open jobs may take half of it.
        """
        self._folder, self._db, self._max_bytes = folder, db, max_bytes
        self.outputs = JobFolders(folder / "files")
        self.inputs = JobFolders(folder / "inputs")
        self.journals = JobFolders(folder / "journals")  # open jobs' journals: `JobJournals`

    def output(self, record: Record, name: str) -> Path | None:
        """The path of a completed job's file; None if it has no file of this name."""
        if name not in record.files or name != Path(name).name:  # a damaged row may hold any name
            return None
        path = self.outputs.path(record.id) / name
        return path if path.is_file() else None

    def input(self, job_id: str, name: str) -> bytes | None:
        """An input of a job; None after the job's end, when inputs are removed."""
        for place in (self.inputs.path, self.inputs.part, self.outputs.path):  # possible places
            with suppress(FileNotFoundError):
                return (place(job_id) / name).read_bytes()
        return None

    def write(
        self, place: JobFolders, job_id: str, write: Callable[[Path], object]
    ) -> dict[str, int]:
        """Write the files of a job, if there is room; returns their sizes by name."""
        try:
            files = place.write(job_id, write)
            # at most half for inputs: their outputs need room too
            limit = self._max_bytes // 2 if place is self.inputs else self._max_bytes
            self._make_room(job_id, sum(files.values()), limit)
            place.flush(job_id)
        except OSError as error:
            raise StoreFailed(f"the files could not be stored: {reason(error)}") from error
        return files

    def _make_room(self, job_id: str, size: int, limit: int) -> None:
        """Delete the oldest completed jobs until the files of another job fit.

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
            self.remove([victim[0]["id"]])
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

    def drop(self, job_id: str, *places: JobFolders) -> None:
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
