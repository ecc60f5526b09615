"""Estimate the load: the part of its time that the device needs for the requests to come.

Only arrivals that find other requests in the engine count. A burst into an idle engine says nothing
of later arrivals: closed bursts, each sent when the last one is done, never fill each other's
forwards. Independent arrivals find the engine as it is at any time, so their rate is the same by
either count (Wolff, Poisson Arrivals See Time Averages, Operations Research 30, 1982).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from carpool.schedule.estimator import HALF_LIFE, Curve
from carpool.schedule.views import ParkedCall, QueuedRequest

MAX_GROWTH = 20  # times the present requests: as many are expected before the engine is empty


@dataclass(slots=True)
class LoadEstimate:
    """Arrivals and denoising forwards, remembered for a while."""

    # of each: seconds that other requests had run by then, and `_arrived_work_s`
    _arrivals: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=HALF_LIFE))
    _arrived_work_s: float = 0.0  # alone on the device
    _busy_s: float = 0.0  # that other requests ran, up to `_forward_s`
    _forward_s: float | None = None  # when the last forward began; None: only one burst so far
    _first_forward_s: float = inf  # since a request found the engine empty
    _last_request: int = 0
    _alone_s: float = 0.0  # what the calls that ran lately would take one by one
    _best_s: float = 0.0  # and at the width that is fastest

    def arrived(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> None:
        """Note the requests of the queue, in order, that were not in it before.

        A request that comes before the first denoising forward has ended counts as part of the
        first burst.

        Args:
            running: requests that were admitted before.
        """
        if not running:
            self._first_forward_s, self._forward_s = inf, None
        if waiting and waiting[-1].request > self._last_request:
            if self._forward_s is not None:
                busy_s = self._busy_by(now_s)
                for request in waiting[-HALF_LIFE:]:
                    if request.request > self._last_request:
                        self._arrived_work_s += request.whole_s
                        self._arrivals.append((busy_s, self._arrived_work_s))
            self._last_request = waiting[-1].request

    def ran(self, calls: Sequence[ParkedCall], curve: Curve, now_s: float) -> None:
        """Note a denoising forward that begins; those of one sweep begin at the same time."""
        if self._forward_s is not None:
            self._busy_s += now_s - self._forward_s
        self._first_forward_s = min(self._first_forward_s, now_s)
        self._forward_s = now_s if now_s > self._first_forward_s else None
        alone_s = sum([curve.seconds(call.rows) for call in calls])
        decay = 1 - 1 / HALF_LIFE
        self._alone_s = decay * self._alone_s + alone_s
        self._best_s = decay * self._best_s + alone_s / curve.speedup(calls[0].max_rows)

    def share(self, now_s: float, load_ratio: float = 1.0) -> float:
        """The part of its time that the device needs for later requests, at the best width.

        Estimated from what it remembers; at most that at which `MAX_GROWTH` times as many come.

        Args:
            load_ratio: mean seconds of forwards, as a multiple of what was predicted of them.
        """
        if len(self._arrivals) < 2:
            return 0.0
        began_s, before_s = self._arrivals[0]
        work_s, busy_s = self._arrived_work_s - before_s, self._busy_by(now_s) - began_s
        speedup = self._alone_s / self._best_s if self._best_s else 1.0
        limit = 1 - 1 / MAX_GROWTH
        return min(limit, load_ratio * work_s / busy_s / speedup) if busy_s > 0 else limit

    def backlog(self, present: float, now_s: float, load_ratio: float = 1.0) -> float:
        """Requests that are in the engine or are likely to come before it is empty."""
        return present / (1 - self.share(now_s, load_ratio))

    def _busy_by(self, now_s: float) -> float:
        return self._busy_s + (now_s - self._forward_s if self._forward_s is not None else 0.0)
