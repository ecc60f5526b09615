"""Estimate the load: the share of its time that the device needs for future requests.

Only arrivals that find other requests in the engine count. A burst into an idle engine predicts no
later arrivals: closed bursts, each sent when the previous one is done, never fill each other's
forwards. Independent arrivals see the engine at random times, so both counts give the same rate
(Wolff, Poisson Arrivals See Time Averages, Operations Research 30, 1982).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from carpool.schedule.cost import LOAD_MEMORY, Curve
from carpool.schedule.views import ParkedCall, QueuedRequest

MAX_GROWTH = 20  # cap on expected requests before the engine is empty, times the present ones


@dataclass(slots=True)
class LoadEstimate:
    """A recent history of arrivals and of denoising forwards."""

    # per arrival: `_busy_s` and `_arrived_work_s` at that time
    _arrivals: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=LOAD_MEMORY))
    _arrived_work_s: float = 0.0  # seconds of work, alone on the device
    _busy_s: float = 0.0  # seconds that earlier requests ran, up to `_forward_s`
    _forward_s: float | None = None  # start of the last forward; None: only one burst so far
    _first_forward_s: float = inf  # since the engine was last idle
    _last_request: int = 0
    _alone_s: float = 0.0  # seconds of recent forwards' calls, if run one by one
    _best_s: float = 0.0  # the same, at the fastest width

    def arrived(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> None:
        """Record the requests that are new in the queue.

        A request that arrives before the end of the first denoising forward counts as part of
        the first burst.

        Args:
            running: number of admitted requests.
        """
        if not running:
            self._first_forward_s, self._forward_s = inf, None
        if waiting and waiting[-1].request > self._last_request:
            if self._forward_s is not None:
                busy_s = self._busy_by(now_s)
                for request in waiting[-LOAD_MEMORY:]:
                    if request.request > self._last_request:
                        self._arrived_work_s += request.whole_s
                        self._arrivals.append((busy_s, self._arrived_work_s))
            self._last_request = waiting[-1].request

    def ran(self, calls: Sequence[ParkedCall], curve: Curve, now_s: float) -> None:
        """Record the start of a denoising forward; forwards of one sweep share a start time."""
        if self._forward_s is not None:
            self._busy_s += now_s - self._forward_s
        self._first_forward_s = min(self._first_forward_s, now_s)
        self._forward_s = now_s if now_s > self._first_forward_s else None
        alone_s = sum([curve.seconds(call.rows) for call in calls])
        decay = 1 - 1 / LOAD_MEMORY
        self._alone_s = decay * self._alone_s + alone_s
        self._best_s = decay * self._best_s + alone_s / curve.speedup(calls[0].max_rows)

    def share(self, now_s: float, load_ratio: float = 1.0) -> float:
        """The share of its time that the device needs for later requests, at the best width.

        Estimated from the recent history; capped so that at most `MAX_GROWTH` times as many come.

        Args:
            load_ratio: mean measured over predicted seconds of forwards.
        """
        if len(self._arrivals) < 2:
            return 0.0
        began_s, before_s = self._arrivals[0]
        work_s, busy_s = self._arrived_work_s - before_s, self._busy_by(now_s) - began_s
        speedup = self._alone_s / self._best_s if self._best_s else 1.0
        limit = 1 - 1 / MAX_GROWTH
        return min(limit, load_ratio * work_s / busy_s / speedup) if busy_s > 0 else limit

    def backlog(self, present: float, now_s: float, load_ratio: float = 1.0) -> float:
        """Requests in the engine, plus those likely to arrive before it is empty."""
        return present / (1 - self.share(now_s, load_ratio))

    def _busy_by(self, now_s: float) -> float:
        return self._busy_s + (now_s - self._forward_s if self._forward_s is not None else 0.0)
