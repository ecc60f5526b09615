"""Records which requests shared denoising forwards, for OpenTelemetry span links.

Used only with tracing. For each running request it keeps the first `MOST_OTHERS` requests that
shared a forward with it, and the first and the last `MOST_FORWARDS // 2` of these forwards, to
bound memory and traffic for requests of any length.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from carpool.engine.observe.timeline import Forward

MOST_OTHERS = 32
MOST_FORWARDS = 64


@dataclass(slots=True)
class _Record:
    """The record of one request."""

    trace: str
    companions: dict[str, None] = field(default_factory=dict)  # traces, by first meeting
    first: list[dict[str, Any]] = field(default_factory=list)
    last: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_FORWARDS // 2))


class CoRiders:
    """Records co-riders. `forward` is for the engine's thread, the rest for any thread."""

    def __init__(self) -> None:
        self._running: dict[str, _Record] = {}

    def start(self, request_id: str, trace: str) -> None:
        """Start to record a request.

        Args:
            trace: its trace, for the records of other requests; empty: leave it out.
        """
        self._running[request_id] = _Record(trace)

    def forward(self, forward: Forward) -> None:
        """An observer of forwards."""
        if forward.phase != "denoise" or forward.requests < 2:
            return
        rows, requests = forward.rows, forward.requests
        records = [(line, self._running.get(line.request_id)) for line in forward.timelines]
        traces = {record.trace: None for _, record in records if record is not None}
        for timeline, record in records:
            if record is None:
                continue
            for trace in traces if len(record.companions) < MOST_OTHERS else ():
                if trace and trace != record.trace and len(record.companions) < MOST_OTHERS:
                    record.companions[trace] = None
            forwards = record.first if len(record.first) < MOST_FORWARDS // 2 else record.last
            at_s = forward.began_s - timeline.submitted_s
            forwards.append({"at_s": at_s, "rows": rows, "requests": requests})

    def end(self, request_id: str) -> dict[str, Any]:
        """Stop recording a request; returns its record.

        Returns:
            `others`: traces of co-riders. `forwards`: `at_s` since submission, `rows`, `requests`.
        """
        record = self._running.pop(request_id, _Record(""))
        return {"others": list(record.companions), "forwards": [*record.first, *record.last]}
