"""Whether a worker still does something, by the beats that it sends once a second.

Who sends none is stopped, or stuck where no other thread of it can run: it has its time and no
more. Who sends them, but stands still, may run a long forward: it has `LONG_PAST` times what that
was likely to take.
"""

from carpool.frames import Beat
from carpool.types import Clock

EVERY_S = 1.0
LONG_PAST = 5.0
MISSED = 3.0  # beats that may fail to come, however short the time is
UNKNOWN = 10.0  # times the timeout: for a forward of which nobody knows what it takes


class Vigil:
    """Listens to one worker from the moment it is ready.

    Args:
        timeout_s: the longest silence, and the longest standstill that needs no reason.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._last, self._heard_s = Beat(0.0, 0.0), clock()
        self._was_over = False  # at the last look

    def heard(self, beat: Beat) -> None:
        self._last, self._heard_s = beat, self._clock()

    @property
    def still_s(self) -> float:
        """For how long it has done nothing, or said nothing."""
        return self._last.stalled_s + self._silent_s

    @property
    def is_over(self) -> bool:
        """Whether it has done or said nothing for too long."""
        is_silent = self._silent_s > max(self._timeout_s, MISSED * EVERY_S)
        return is_silent or self._last.stalled_s > self._patience_s

    def look(self) -> bool:
        """Whether the worker hangs; to be asked every `EVERY_S`.

        It does if it did at the last look, too: a front that stood still itself has beats to hear.
        """
        was_over, self._was_over = self._was_over, self.is_over
        return was_over and self._was_over

    @property
    def _silent_s(self) -> float:
        return self._clock() - self._heard_s

    @property
    def _patience_s(self) -> float:
        """How long it may stand still with what it does now."""
        if self._last.expected_s is None:
            return UNKNOWN * self._timeout_s
        return max(self._timeout_s, LONG_PAST * self._last.expected_s)
