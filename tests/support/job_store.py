"""A job store with a clock set by hand, what is put into it, and its sudden end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from carpool.jobs.clock import StoreClock
from carpool.jobs.database import Record
from carpool.jobs.store import JobStore


class Hand:
    """Time that passes when a test says so; its wall clock may be set."""

    def __init__(self) -> None:
        self.now_s = 1000.0  # by the wall clock
        self.boot_s = self.awake_s = 7.0

    def run(self) -> StoreClock:
        """The clock of a run that begins now."""
        return StoreClock(lambda: self.now_s, lambda: self.boot_s, lambda: self.awake_s)

    def pass_by(self, seconds: float) -> None:
        self.suspend(seconds)
        self.awake_s += seconds

    def suspend(self, seconds: float) -> None:
        self.now_s += seconds
        self.boot_s += seconds


def writes(**files: bytes) -> Callable[[Path], object]:
    """Writes files, `a_txt` as `a.txt`."""

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name.replace("_", ".")).write_bytes(content)

    return write


def submit(store: JobStore, name: str = "a", **options: Any) -> Record:
    return store.submit("video", {"prompt": name}, {"seed": 1}, **options)


def killed(store: JobStore) -> None:
    """Leave a store as the kernel does with that of a killed process."""
    store._db.close()
    store._claim.close()
