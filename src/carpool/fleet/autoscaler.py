"""The autoscaler: chooses the number of workers of a model from the predicted wait.

It adds workers when the predicted wait exceeded `wait_s` at every check within `UP_S`: enough to
start all requests within `wait_s`, at most doubling the number. It removes one at a time when not
all were busy for `idle_s`. So load that comes and goes within `idle_s` changes nothing. No clock:
callers pass the time.

Source: the stabilization window of Kubernetes' HorizontalPodAutoscaler.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil

UP_S = 3.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The scaling settings of a model.

    Args:
        low, high: bounds of the number of workers, at least 1.
        wait_s: longest predicted wait in the queue.
        idle_s: seconds of low load before a worker is removed.
    """

    low: int
    high: int
    wait_s: float = 10.0
    idle_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Demand:
    """The current load of a pool.

    Args:
        workers: workers that serve or load, without leaving ones.
        busy: workers with requests.
        held_s: predicted work of requests without a worker.
    """

    workers: int
    busy: int
    held_s: float


class Autoscaler:
    """Chooses the number of workers at each check."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._needs: deque[tuple[float, int]] = deque()  # time of the check, workers needed

    def workers(self, now_s: float, demand: Demand) -> int:
        """The target number of workers; `now_s` must not decrease between calls."""
        scale = self._scale
        now = max(1, demand.workers)
        if not scale.low <= demand.workers <= scale.high:
            return min(max(demand.workers, scale.low), scale.high)
        self._needs.append((now_s, self._need(demand, now)))
        while len(self._needs) > 1 and self._needs[1][0] <= now_s - scale.idle_s:
            self._needs.popleft()
        up = [need for at_s, need in self._needs if at_s >= now_s - UP_S]
        is_seen = self._needs[0][0] <= now_s - UP_S
        if is_seen and min(up) > demand.workers:
            return min(min(up), 2 * now, scale.high)
        is_old = self._needs[0][0] <= now_s - scale.idle_s
        if is_old and max(need for _, need in self._needs) < demand.workers:
            return max(demand.workers - 1, scale.low)
        return demand.workers

    def _need(self, demand: Demand, now: int) -> int:
        wait_s = demand.held_s / now
        if wait_s > self._scale.wait_s:
            return ceil(demand.held_s / self._scale.wait_s)
        return demand.workers if demand.held_s else demand.busy
