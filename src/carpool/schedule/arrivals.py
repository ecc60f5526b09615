"""Estimate the load: the part of its time that the device needs for the requests to come.

Only arrivals that find other requests in the engine count. A burst into an idle engine says nothing
of later arrivals: closed bursts, each sent when the last one is done, never fill each other's
forwards. Independent arrivals find the engine as it is at any time, so their rate is the same by
either count (Wolff, Poisson Arrivals See Time Averages, Operations Research 30, 1982).
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

from carpool.schedule.cost import AnyCurve
from carpool.schedule.views import ParkedCall, QueuedRequest

REMEMBERED = 400  # arrivals
KEPT = 0.999  # of the weight of what ran before, at each forward
LATELY = 100  # forwards
BUSY = 0.95  # no load is taken for more: the backlog would have no end
COMING = 3.0  # times as many as came so far: more are not counted on


@dataclass(slots=True)
class LoadEstimate:
    """Arrivals and denoising forwards, remembered for a while."""

    # of arrivals while others ran: seconds that others had run by then, and `_came_s`
    _came: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _came_s: float = 0.0  # their work, alone on the device
    _busy_s: float = 0.0  # that others ran, up to `_since_s`
    _since_s: float | None = None  # when the last forward began; None: all came at once so far
    _first_s: float = inf  # when the first one began since a request found the engine empty
    _last: int = 0  # request that came last
    _alone_s: float = 0.0  # what the calls that ran lately would take one by one
    _best_s: float = 0.0  # and at the width that is fastest
    _key: Hashable = None  # of the last forward
    _unmixed: int = LATELY  # forwards since the key was another

    def came(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> None:
        """Note the requests of the queue, in order, that were not in it before.

        A request that comes before the first denoising forward has ended counts as part of the
        first burst.

        Args:
            running: requests that were admitted before.
        """
        if not running:
            self._first_s, self._since_s = inf, None
        if waiting and waiting[-1].request > self._last:
            if self._since_s is not None:
                busy_s = self._busy_by(now_s)
                for one in waiting[-REMEMBERED:]:
                    if one.request > self._last:
                        self._came_s += one.whole_s
                        self._came.append((busy_s, self._came_s))
            self._last = waiting[-1].request

    def ran(self, calls: Sequence[ParkedCall], curve: AnyCurve, now_s: float) -> None:
        """Note a denoising forward that begins; those of one sweep begin at the same time."""
        self._busy_s = self._busy_by(now_s)
        self._first_s = min(self._first_s, now_s)
        self._since_s = now_s if now_s > self._first_s else None
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
        """The part of its time that the device needs for later requests, at the best width.

        Estimated from what it remembers; at most `BUSY`.

        Args:
            stretch: mean seconds of forwards, as a multiple of what was predicted of them.
        """
        if len(self._came) < 2:
            return 0.0
        began_s, before_s = self._came[0]
        work_s, over_s = self._came_s - before_s, self._busy_by(now_s) - began_s
        best = self._alone_s / self._best_s if self._best_s else 1.0
        return min(BUSY, stretch * work_s / over_s / best) if over_s > 0 else BUSY

    def backlog(self, present: float, now_s: float, stretch: float = 1.0) -> float:
        """Requests that are in the engine or are likely to come before it is empty."""
        coming = present / (1 - self.share(now_s, stretch)) - present
        return present + min(coming, COMING * len(self._came))

    def _busy_by(self, now_s: float) -> float:
        return self._busy_s + (now_s - self._since_s if self._since_s is not None else 0.0)
