"""Files of jobs: a folder a job, which appears all at once or not at all.

It is filled under another name, brought to the disk, and then renamed. What was on its way when a
process was killed is swept by the next one.
"""

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

PART = ".part"


class Folders:
    """The folders of all jobs of a store."""

    def __init__(self, path: Path) -> None:
        """Open them.

        Raises:
            OSError: there is no place for them.
        """
        self._path = path
        path.mkdir(exist_ok=True)

    def of(self, job_id: str) -> Path:
        """Where the files of a job lie, if it has any."""
        return self._path / job_id

    def fill(self, job_id: str, write: Callable[[Path], object]) -> dict[str, int]:
        """Have `write` put files into a folder that nobody sees yet.

        Returns:
            Their bytes by name.

        Raises:
            OSError: of `write`, or of the disk.
        """
        self.drop(job_id)
        part = self.of(job_id + PART)
        part.mkdir()
        write(part)
        return {path.name: path.stat().st_size for path in sorted(part.iterdir())}

    def show(self, job_id: str) -> None:
        """Let the folder appear that `fill` filled; it is on the disk then.

        Raises:
            OSError: the disk refuses it.
        """
        part = self.of(job_id + PART)
        for path in (*part.iterdir(), part):
            _sync(path)
        os.rename(part, self.of(job_id))
        _sync(self._path)

    def drop(self, job_id: str) -> None:
        """Remove the files of a job, those that are on their way too."""
        for name in (job_id + PART, job_id):
            shutil.rmtree(self._path / name, ignore_errors=True)

    def sweep(self, kept: Collection[str]) -> None:
        """Remove all folders but those of some jobs."""
        for path in self._path.iterdir():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
