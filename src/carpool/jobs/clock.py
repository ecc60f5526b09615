"""The clock of a job store: a changed wall clock, or suspending, does not change jobs' ages.

*Unix time* is for moments that clients see: the wall clock as the process starts, advanced by the
time since boot. Within a run it never jumps.

*Uptime* is for ages and deadlines: the seconds in which a server had the store open, in all its
runs, while the machine was awake. What lies between two runs does not count: whether the server
was off or the wall clock was set cannot be told apart.
"""

import time
from collections.abc import Callable

from carpool.types import Clock


def _since_boot() -> float:
    """Seconds since boot, those in suspend included, which `time.monotonic` of Linux leaves out."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class StoreClock:
    """Unix time and uptime of one run. From any thread."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        since_boot: Clock = _since_boot,
        awake: Clock = time.monotonic,
    ) -> None:
        """Begin at uptime 0; `wall`, in Unix seconds, is read once."""
        self._since_boot, self._awake = since_boot, awake
        self._boot_s = wall() - since_boot()  # Unix seconds
        self._began_s = awake()

    def resume(self, uptime_s: float) -> None:
        """Continue from the uptime of earlier runs."""
        self._began_s = self._awake() - uptime_s

    def __call__(self) -> float:
        """Unix seconds."""
        return self._boot_s + self._since_boot()

    def uptime_s(self) -> float:
        return self._awake() - self._began_s
