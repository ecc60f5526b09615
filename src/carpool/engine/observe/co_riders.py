"""Records which requests shared denoising forwards, for OpenTelemetry span links.

Used only where traces are. Of each running request are kept the first `MOST_OTHERS` others that
it shared a forward with, and of these forwards the first and the last `MOST_FORWARDS // 2`: a
bound on memory and on what is sent, however long it runs.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from carpool.engine.observe.forward import Forward

MOST_OTHERS = 32
MOST_FORWARDS = 64


@dataclass(slots=True)
class _Seen:
    """By one request."""

    trace: str
    others: dict[str, None] = field(default_factory=dict)  # their traces, in the order of meeting
    first: list[dict[str, Any]] = field(default_factory=list)
    last: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_FORWARDS // 2))

    def meet(self, trace: str | None) -> None:
        if trace and trace != self.trace and len(self.others) < MOST_OTHERS:
            self.others[trace] = None


class CoRiders:
    """Which requests ran together. `forward` is for the engine's thread, the rest for any."""

    def __init__(self) -> None:
        self._running: dict[str, _Seen] = {}

    def start(self, request_id: str, trace: str) -> None:
        """A request starts to run.

        Args:
            trace: how others are to refer to it; empty: they do not.
        """
        self._running[request_id] = _Seen(trace)

    def forward(self, forward: Forward) -> None:
        """An observer of forwards."""
        if forward.phase != "denoise" or forward.requests < 2:
            return
        rows, requests = forward.rows, forward.requests
        seen = [(state, self._running.get(state.request_id)) for state in forward.states]
        traces = {one.trace: None for _, one in seen if one is not None}
        for state, one in seen:
            if one is None:
                continue
            for trace in traces if len(one.others) < MOST_OTHERS else ():
                one.meet(trace)
            kept = one.first if len(one.first) < MOST_FORWARDS // 2 else one.last
            at_s = forward.began_s - state.submitted_s
            kept.append({"at_s": at_s, "rows": rows, "requests": requests})

    def end(self, request_id: str) -> dict[str, Any]:
        """A request has ended: returns what was recorded of it, and forgets it.

        Returns:
            `others`: their traces. `forwards`: `at_s` since submission, `rows`, `requests`.
        """
        one = self._running.pop(request_id, None)
        if one is None:
            return {"others": [], "forwards": []}
        return {"others": list(one.others), "forwards": [*one.first, *one.last]}
