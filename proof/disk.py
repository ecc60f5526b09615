"""A disk that can be full: a small file system in memory, or a limit on the sizes of files.

Mounting needs root. Without it the kernel is told to refuse the server's writes beyond the first
page of a file, which looks the same from within: a write fails, and goes on failing for a while.
"""

import contextlib
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 64 << 20
LEAST_BYTES = 4096  # that a file may have on a disk without room


@dataclass(slots=True)
class Disk:
    """Where the server keeps its state."""

    folder: Path
    is_mounted: bool
    front: Callable[[], int]  # the process that writes there

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"

    def fill(self) -> None:
        """No room from now on."""
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
        with contextlib.suppress(ProcessLookupError):  # it was killed; the next one has no limit
            pid = self.front()
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            soft = hard if most_bytes == resource.RLIM_INFINITY else most_bytes
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def disk(folder: Path, front: Callable[[], int]) -> Iterator[Disk]:
    """Make a folder a disk of its own, if that is allowed."""
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
