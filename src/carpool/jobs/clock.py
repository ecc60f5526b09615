"""Time as a store of jobs counts it: no clock that is set makes a job older, or younger.

*Unix time* is for moments that clients see. It is the wall clock's as the process starts, and from
then on advances with the time since boot, suspended or not: within a run it never jumps.

*Uptime* is for ages and deadlines: the seconds in which a server had the store open, in all its
runs, while the machine was awake. What lies between two runs, be it a weekend or a wall clock that
was set, does not count: nobody could tell them apart.
"""

import time
from collections.abc import Callable

from carpool.types import Clock


def _since_boot() -> float:
    """Seconds since boot, those in suspend included. `time.monotonic` of Linux leaves them out."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class StoreClock:
    """Both times of one run. From any thread."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        since_boot: Clock = _since_boot,
        awake: Clock = time.monotonic,
    ) -> None:
        """Begin a run; no other went before it.

        Args:
            wall: Unix seconds; asked once.
        """
        self._since_boot, self._awake = since_boot, awake
        self._boot_s = wall() - since_boot()  # Unix seconds
        self._began_s = awake()

    def resume(self, uptime_s: float) -> None:
        """Go on from the uptime of earlier runs."""
        self._began_s = self._awake() - uptime_s

    def __call__(self) -> float:
        """Unix seconds."""
        return self._boot_s + self._since_boot()

    def uptime_s(self) -> float:
        return self._awake() - self._began_s
