"""Files of jobs: a folder for each job, published and removed atomically by a rename.

A folder is written as `ID.part`, flushed to the disk, then renamed to `ID`. To be removed, it is
first renamed back to `ID.part`, its tombstone. What a killed process left half done is settled by
`recover`. Only names that are made here are ever removed, and never through a symbolic link.
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
            FileNotFoundError: it is no id of a job.
        """
        if not _ID.fullmatch(job_id):  # from a damaged row
            raise FileNotFoundError(f"{job_id[:80]!r} is no id of a job")
        return self._path / job_id

    def part(self, job_id: str) -> Path:
        """The folder of files that are not published yet, or are being removed."""
        return self.path(job_id).with_suffix(_PART)

    def write(self, job_id: str, write: Callable[[Path], object]) -> dict[str, int]:
        """Have `write` put files into an unpublished folder; gives their bytes by name."""
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
        """Make a flushed folder visible, for good."""
        os.rename(self.part(job_id), self.path(job_id))
        _sync(self._path)

    def bury(self, job_ids: Iterable[str]) -> None:
        """Begin to remove folders: `drop` completes it, `restore` takes it back."""
        for job_id in job_ids:
            with suppress(FileNotFoundError):
                os.rename(self.path(job_id), self.part(job_id))
        _sync(self._path)

    def restore(self, job_ids: Iterable[str]) -> None:
        """Make folders visible; those that the disk refuses become so after a restart."""
        for job_id in job_ids:
            with suppress(OSError):
                os.rename(self.part(job_id), self.path(job_id))

    def drop(self, job_id: str) -> None:
        """Remove the files of a job, unpublished ones too."""
        with suppress(FileNotFoundError):
            for path in (self.part(job_id), self.path(job_id)):
                shutil.rmtree(path, ignore_errors=True)

    def recover(
        self, states: Mapping[str, str], *, having: Collection[str], without: Collection[str]
    ) -> list[str]:
        """Make the folders agree with the states of jobs, after a crash.

        Args:
            states: of all known jobs, by id.
            having: a job in these states has a folder: its tombstone is restored.
            without: a job in these has none: it is removed. In all others it may have one.

        Returns:
            Ids of folders of unknown jobs, which stay: the database may be older than they are.
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
