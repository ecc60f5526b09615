"""The engine's activity for viewers: forwards as they end, and a snapshot of requests.

Forwards are kept only while `is_on`, as plain tuples: they must not keep requests alive.
"""

from collections import deque
from collections.abc import Sequence
from math import isfinite

from carpool.engine.observe.timeline import Forward
from carpool.engine.request import RequestState
from carpool.telemetry.activity import RunningRequest, SeenForward, Snapshot, WaitingRequest

CAPACITY = 512  # forwards kept between two readings; older ones are only counted
MOST_LISTED = 256  # waiting requests of a snapshot


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
        self._forwards.append(
            SeenForward(
                f"{forward.component}.{forward.method}",
                forward.phase,
                forward.began_s,
                forward.duration_s,
                forward.rows,
                tuple([timeline.number for timeline in forward.timelines]),
                forward.why,
            )
        )

    def take(self) -> tuple[list[SeenForward], int]:
        """The forwards since the last reading, and the number of those that were not kept."""
        count, forwards = self._count, []
        while self._forwards:
            forwards.append(self._forwards.popleft())
        missed = max(0, count - self._reported - len(forwards))
        self._reported = max(count, self._reported + len(forwards))
        return forwards, missed


def snapshot(
    now_s: float,
    running: Sequence[RequestState],
    queued: Sequence[RequestState],
    starts_s: Sequence[float | None],
    slowdown: float,
) -> Snapshot:
    """A snapshot of the requests at this moment. From any thread.

    Args:
        slowdown: present seconds as a multiple of usual ones.
    """
    requests = []
    for state in running:
        parked, timeline = state.parked, state.timeline
        left_s = None
        if parked is not None and isfinite(parked.left_s):
            left_s = parked.left_s * slowdown
        requests.append(
            RunningRequest(
                state.number,
                timeline.request_id,
                timeline.phase,
                timeline.step,
                timeline.steps,
                left_s,
                timeline.tokens,
            )
        )
    waits = [
        WaitingRequest(state.number, state.request_id, now_s - state.submitted_s, start_s)
        for state, start_s in zip(queued[:MOST_LISTED], starts_s, strict=False)
    ]
    return Snapshot(now_s, tuple(requests), tuple(waits), len(queued))
