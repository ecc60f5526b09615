"""Files of jobs: a folder a job, which appears all at once or not at all.

It is filled under another name, brought to the disk, and then renamed; to be removed, it is renamed
back first. What was on its way when a process was killed is swept by the next one. Only names that
are made here are ever removed, and never through a symbolic link.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

PART = ".part"
_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")


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
        """Where the files of a job lie, if it has any.

        Raises:
            FileNotFoundError: no job is called that.
        """
        if not _ID.fullmatch(job_id):  # from a damaged row
            raise FileNotFoundError(f"{job_id[:80]!r} is no id of a job")
        return self._path / job_id

    def part_of(self, job_id: str) -> Path:
        """Where they lie on their way in and out."""
        return self.of(job_id).with_suffix(PART)

    def fill(self, job_id: str, write: Callable[[Path], object]) -> dict[str, int]:
        """Have `write` put files into a folder that nobody sees yet.

        Returns:
            Their bytes by name.

        Raises:
            OSError: of `write`, or of the disk.
        """
        self.drop(job_id)
        part = self.part_of(job_id)
        part.mkdir()
        write(part)
        return {path.name: path.stat().st_size for path in sorted(part.iterdir())}

    def flush(self, job_id: str) -> None:
        """Bring what `fill` wrote to the disk.

        Raises:
            OSError: the disk refuses it.
        """
        part = self.part_of(job_id)
        for path in (*part.iterdir(), part, self._path):
            _sync(path)

    def show(self, job_id: str) -> None:
        """Let a folder appear that was filled and flushed.

        Raises:
            OSError: the disk refuses it.
        """
        os.rename(self.part_of(job_id), self.of(job_id))
        _sync(self._path)

    def hide(self, job_ids: Iterable[str]) -> None:
        """Begin to remove folders: `drop` ends it, `restore` takes it back, also after a crash."""
        for job_id in job_ids:
            with suppress(FileNotFoundError):
                os.rename(self.of(job_id), self.part_of(job_id))
        _sync(self._path)

    def restore(self, job_ids: Iterable[str]) -> None:
        """Let hidden folders appear again; those that the disk refuses do so after a restart."""
        for job_id in job_ids:
            with suppress(OSError):
                os.rename(self.part_of(job_id), self.of(job_id))

    def drop(self, job_id: str) -> None:
        """Remove the files of a job, those that are on their way too."""
        with suppress(FileNotFoundError):
            for path in (self.part_of(job_id), self.of(job_id)):
                shutil.rmtree(path, ignore_errors=True)

    def sweep(
        self, states: Mapping[str, str], *, having: Collection[str], without: Collection[str]
    ) -> list[str]:
        """Bring the folders to what the states of jobs say, after a crash.

        Args:
            states: of all jobs that are known, by id.
            having: in these states a job has a folder: a hidden one appears again.
            without: in these it has none: it is removed. In all others it may have one.

        Returns:
            Ids of folders that belong to no known job. They stay: the database may be older.
        """
        unknown = []
        for entry in sorted(os.scandir(self._path), key=lambda entry: entry.name):
            job_id = entry.name.removesuffix(PART)
            if not _ID.fullmatch(job_id) or not entry.is_dir(follow_symlinks=False):
                continue
            state = states.get(job_id)
            if entry.name != job_id:
                if state in having and not self.of(job_id).exists():
                    self.restore([job_id])
                else:
                    shutil.rmtree(entry.path, ignore_errors=True)
            elif state is None:
                unknown.append(job_id)
            elif state in without:
                self.drop(job_id)
        return unknown


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
