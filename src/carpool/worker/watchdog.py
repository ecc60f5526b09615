"""Whether a worker still does something, by the beats that it sends once a second.

A worker may stand still for its time, and for `LONG_PAST` times what it does was likely to take,
whether it says so or is silent: a long forward may keep its other threads from running, too. Where
nobody knows what that was likely to take, who still sends beats has longer than who sends none.
"""

from carpool.types import Clock
from carpool.worker.protocol import Beat

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
        expected_s, is_long_past = self._last.expected_s, self.still_s > self._long_past_s
        is_silent = self._silent_s > max(self._timeout_s, MISSED * EVERY_S)
        patience_s = self._timeout_s if expected_s is not None else UNKNOWN * self._timeout_s
        return is_long_past and (is_silent or self._last.stalled_s > patience_s)

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
    def _long_past_s(self) -> float:
        """When what it does now ought to be done, by far; 0 where nobody knows."""
        return LONG_PAST * (self._last.expected_s or 0.0)
