"""Files of jobs: a folder for each job, published and removed atomically by a rename.

A folder is written as `ID.part`, flushed to the disk, then renamed to `ID`. Removal first renames
it back to `ID.part`, its tombstone. `recover` completes or reverts the unfinished steps of a killed
process. Only folders named as above are removed, and never through a symbolic link.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_PART = ".part"
_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")


class FileStore:
    """The folders of all jobs of a store."""

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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
