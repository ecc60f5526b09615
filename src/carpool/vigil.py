"""Whether a worker still does something, by the beats that it sends once a second.

A forward may take long, and a busy machine may delay a beat. So a worker is given up only when it
has stood still for its time, and for `LONG_PAST` times what its forward was likely to take.
"""

from carpool.frames import Beat
from carpool.types import Clock

EVERY_S = 1.0
LONG_PAST = 5.0
UNKNOWN = 10.0  # times the timeout: for a forward of which nobody knows what it takes


class Vigil:
    """Listens to one worker from the moment it is ready.

    Args:
        timeout_s: the longest silence.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._last, self._heard_s = Beat(0.0, 0.0), clock()

    def heard(self, beat: Beat) -> None:
        self._last, self._heard_s = beat, self._clock()

    @property
    def still_s(self) -> float:
        """For how long it has done nothing, or said nothing."""
        return self._last.stalled_s + self._clock() - self._heard_s

    @property
    def is_over(self) -> bool:
        """Whether the worker hangs."""
        expected_s = self._last.expected_s
        if expected_s is None:
            return self.still_s > UNKNOWN * self._timeout_s
        return self.still_s > max(self._timeout_s, LONG_PAST * expected_s)
