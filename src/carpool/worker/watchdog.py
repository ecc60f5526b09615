"""The watchdog: decides from heartbeats whether a worker hangs.

A worker hangs when it makes no progress for longer than the timeout and for longer than
`OVERRUN_FORWARDS` times the expected duration of its current forward. Both missing heartbeats and
heartbeats that report a stall count, because a long forward may block the worker's other threads.
If the expected duration is unknown, a worker that still sends heartbeats gets `UNKNOWN_TIMEOUTS`
times the timeout.
"""

from carpool.types import Clock
from carpool.worker.protocol import Heartbeat

INTERVAL_S = 1.0  # between heartbeats, and between checks
OVERRUN_FORWARDS = 5.0
MISSED_HEARTBEATS = 3.0  # missed heartbeats that are always tolerated
UNKNOWN_TIMEOUTS = 10.0
LOADING_TIMEOUTS = 2.0  # imports may block all threads of a process


class Watchdog:
    """Watches one worker; one watchdog for loading, and a new one once it is ready.

    Args:
        timeout_s: max silence, and max stall without a long forward.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._last, self._received_s = Heartbeat(0.0, 0.0), clock()
        self._was_overdue = False  # at the last check

    def receive(self, heartbeat: Heartbeat) -> None:
        self._last, self._received_s = heartbeat, self._clock()

    @property
    def stalled_s(self) -> float:
        """Seconds since the last known progress of the worker."""
        return self._last.stalled_s + self._silent_s

    @property
    def is_overdue(self) -> bool:
        """Whether the worker has been stalled or silent for too long."""
        expected_s = self._last.expected_s
        is_past_expected = self.stalled_s > OVERRUN_FORWARDS * (expected_s or 0.0)
        is_silent = self._silent_s > max(self._timeout_s, MISSED_HEARTBEATS * INTERVAL_S)
        stall_limit_s = self._timeout_s * (UNKNOWN_TIMEOUTS if expected_s is None else 1)
        return is_past_expected and (is_silent or self._last.stalled_s > stall_limit_s)

    def check(self) -> bool:
        """Return whether the worker hangs; call it every `INTERVAL_S`.

        Two overdue checks in a row are needed: after a stall of the front itself, received
        heartbeats are still unread at the first one.
        """
        was_overdue, self._was_overdue = self._was_overdue, self.is_overdue
        return was_overdue and self._was_overdue

    @property
    def _silent_s(self) -> float:
        return self._clock() - self._received_s
