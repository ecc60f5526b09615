"""The engine's activity, for those who watch it: forwards as they end, and a snapshot of requests.

Forwards are kept only while `is_on`, as plain tuples: they must not keep requests alive.
"""

from collections import deque
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from carpool.engine.observe.forward import Forward
from carpool.telemetry.activity import RunningRequest, SeenForward, Snapshot, WaitingRequest

if TYPE_CHECKING:
    from carpool.engine.request import RequestState

KEPT = 512  # forwards between two readings; the oldest of more are counted only
MOST_LISTED = 256  # waiting requests of a snapshot


class ActivityLog:
    """The forwards since the last reading. `forward` is for the engine's thread, others for one."""

    def __init__(self) -> None:
        self.is_on = False
        self._seen: deque[SeenForward] = deque(maxlen=KEPT)
        self._count = self._taken = 0

    def forward(self, forward: Forward) -> None:
        """An observer of forwards."""
        if not self.is_on:
            return
        self._count += 1
        self._seen.append(
            SeenForward(
                f"{forward.component}.{forward.method}",
                forward.phase,
                forward.began_s,
                forward.duration_s,
                forward.rows,
                tuple([state.number for state in forward.states]),
                forward.why,
            )
        )

    def take(self) -> tuple[list[SeenForward], int]:
        """The forwards since the last time, and how many more there were than are kept."""
        count, taken = self._count, []
        while self._seen:
            taken.append(self._seen.popleft())
        missed = max(0, count - self._taken - len(taken))
        self._taken = max(count, self._taken + len(taken))
        return taken, missed


def snapshot(
    now_s: float,
    running: "Sequence[RequestState]",
    queued: "Sequence[RequestState]",
    starts_s: Sequence[float | None],
    slower: float,
) -> Snapshot:
    """A snapshot of the requests at this moment. From any thread.

    Args:
        slower: seconds just now, as a multiple of usual ones.
    """
    seen = []
    for state in running:
        parked, timeline = state.parked, state.timeline
        left_s = None
        if parked is not None and isfinite(parked.left_s):
            left_s = parked.left_s * slower
        seen.append(
            RunningRequest(
                state.number,
                timeline.request_id,
                timeline.phase,
                timeline.step,
                timeline.steps,
                left_s,
            )
        )
    waits = [
        WaitingRequest(state.number, state.request_id, now_s - state.submitted_s, start_s)
        for state, start_s in zip(queued[:MOST_LISTED], starts_s, strict=False)
    ]
    return Snapshot(now_s, tuple(seen), tuple(waits), len(queued))
