"""The clock of a job store: clock changes and suspend do not change jobs' ages.

*Unix time* is for times that clients see: the wall clock at the start of the process, plus the time
since boot. It never jumps within a run.

*Uptime* is for ages and deadlines: the total seconds in which a server had the store open and the
machine was awake. Time between two runs does not count, because a stopped server cannot be
distinguished from a changed wall clock.
"""

import time
from collections.abc import Callable

from carpool.types import Clock


def _since_boot() -> float:
    """Seconds since boot, with suspend, which Linux's `time.monotonic` excludes."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class StoreClock:
    """Unix time and uptime of one run. Thread-safe."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        since_boot: Clock = _since_boot,
        awake: Clock = time.monotonic,
    ) -> None:
        """Start at uptime 0; `wall` (Unix seconds) is read once."""
        self._since_boot, self._awake = since_boot, awake
        self._boot_s = wall() - since_boot()  # Unix seconds
        self._began_s = awake()

    def resume(self, uptime_s: float) -> None:
        """Add the uptime of earlier runs."""
        self._began_s = self._awake() - uptime_s

    def __call__(self) -> float:
        """Unix seconds."""
        return self._boot_s + self._since_boot()

    def uptime_s(self) -> float:
        return self._awake() - self._began_s
