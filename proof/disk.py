"""A disk that can be full: a small file system in memory, or a limit on the sizes of files.

Mounting needs root. Without root, a resource limit makes the server's writes fail beyond the first
page of a file, with the same effect: writes fail for a while.
"""

import contextlib
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 64 << 20
LEAST_BYTES = 4096  # size limit of files on a full disk


@dataclass(slots=True)
class Disk:
    """The disk of the server's state."""

    folder: Path
    is_mounted: bool
    front: Callable[[], int]  # returns the process that writes there

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"

    def fill(self) -> None:
        """Make the disk full."""
        if not self.is_mounted:
            self._limit(LEAST_BYTES)
            return
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    def free(self) -> None:
        """Room again."""
        if self.is_mounted:
            self._filler.unlink(missing_ok=True)
        else:
            self._limit(resource.RLIM_INFINITY)

    def _limit(self, most_bytes: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # killed; its successor has no limit
            pid = self.front()
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            soft = hard if most_bytes == resource.RLIM_INFINITY else most_bytes
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def disk(folder: Path, front: Callable[[], int]) -> Iterator[Disk]:
    """Make a folder a separate disk, if permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "carpool-proof", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield Disk(folder, is_mounted, front)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
