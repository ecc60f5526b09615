"""How busy the device is going to be, by what came and what ran lately."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from carpool.schedule.cost import AnyCurve
from carpool.types import ParkedCall, QueuedRequest

REMEMBERED = 400  # arrivals
KEPT = 0.999  # of the weight of what ran before, at each forward
LATELY = 100  # forwards
BUSY = 0.91  # no load is taken for more: the backlog would have no end
COMING = 3.0  # times as many as came so far: more are not counted on


@dataclass(slots=True)
class Load:
    """Arrivals and denoising forwards, remembered for a while."""

    _came: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _came_s: float = 0.0  # work of all that came, alone on the device
    _last: int = 0  # request that came last
    _alone_s: float = 0.0  # what the calls that ran lately would take one by one
    _best_s: float = 0.0  # and at the width that is fastest
    _key: Hashable = None  # of the last forward
    _unmixed: int = LATELY  # forwards since the key was another

    def came(self, waiting: Sequence[QueuedRequest]) -> None:
        """Note those of a line, in order, that were not in it before."""
        if waiting and waiting[-1].request > self._last:
            for one in waiting[-REMEMBERED:]:
                if one.request > self._last:
                    self._came_s += one.whole_s
                    self._came.append((one.arrived_s, self._came_s))
            self._last = waiting[-1].request

    def ran(self, calls: Sequence[ParkedCall], curve: AnyCurve) -> None:
        """Note a denoising forward."""
        is_same = self._key is None or calls[0].key == self._key
        self._key, self._unmixed = calls[0].key, self._unmixed + 1 if is_same else 0
        alone_s = sum([curve.seconds(call.rows) for call in calls])
        self._alone_s = KEPT * self._alone_s + alone_s
        self._best_s = KEPT * self._best_s + alone_s / curve.speedup(calls[0].max_rows)

    @property
    def is_mixed(self) -> bool:
        """Whether calls that cannot share a forward took turns lately."""
        return self._unmixed < LATELY

    def share(self, now_s: float, stretch: float = 1.0) -> float:
        """The part of its time that the device needs for what comes, if it runs as wide as pays.

        Estimated from what it remembers; at most `BUSY`.

        Args:
            stretch: mean seconds of forwards, as a multiple of what was predicted of them.
        """
        if len(self._came) < 2:
            return 0.0
        began_s, before_s = self._came[0]
        work_s, over_s = self._came_s - before_s, now_s - began_s
        best = self._alone_s / self._best_s if self._best_s else 1.0
        return min(BUSY, stretch * work_s / over_s / best) if over_s > 0 else BUSY

    def backlog(self, present: float, now_s: float, stretch: float = 1.0) -> float:
        """Requests that are in the engine or are likely to come before it is empty."""
        coming = present / (1 - self.share(now_s, stretch)) - present
        return present + min(coming, COMING * len(self._came))
