"""The engine's activity for monitoring: completed forwards, recorded only while `is_on`."""

from collections import deque

from carpool.engine.observe.timeline import Forward
from carpool.telemetry.activity import SeenForward

CAPACITY = 512  # recorded between two readings; older ones are only counted


class ActivityLog:
    """The forwards since the last reading. `forward` is for the engine's thread."""

    def __init__(self) -> None:
        self.is_on = False
        self._forwards: deque[SeenForward] = deque(maxlen=CAPACITY)
        self._count = self._reported = 0

    def forward(self, forward: Forward) -> None:
        """An observer of forwards."""
        if not self.is_on:
            return
        self._count += 1
        numbers = tuple([timeline.number for timeline in forward.timelines])
        times_s = forward.began_s, forward.duration_s
        about = f"{forward.component}.{forward.method}", forward.phase
        self._forwards.append(SeenForward(*about, *times_s, forward.rows, numbers, forward.why))

    def take(self) -> tuple[list[SeenForward], int]:
        """The forwards since the last reading, and the number of dropped ones."""
        count = self._count
        forwards = [self._forwards.popleft() for _ in range(len(self._forwards))]
        missed = max(0, count - self._reported - len(forwards))
        self._reported = max(count, self._reported + len(forwards))
        return forwards, missed
