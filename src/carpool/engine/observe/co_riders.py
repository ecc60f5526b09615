"""With whom requests rode: noted for traces, and not at all where nobody wants those.

Of each request aboard are kept the first `MOST_OTHERS` other ones that it shared a denoising
forward with, and of these forwards the first and the last `MOST_FORWARDS // 2`: a bound on memory
and on what is sent, however long it rides. Nothing here knows what a trace is.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.types import Phase

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


class Company:
    """Who rode with whom. The engine's thread notes, any thread may take a request out."""

    def __init__(self) -> None:
        self._aboard: dict[str, _Seen] = {}

    def came(self, request_id: str, trace: str) -> None:
        """A request came aboard.

        Args:
            trace: how the others are to name it; nothing: they do not.
        """
        self._aboard[request_id] = _Seen(trace)

    def rode(self, phase: Phase, rows: int, riders: Mapping[str, float]) -> None:
        """A forward ran.

        Args:
            rows: of its batch.
            riders: ids, with the seconds from each one's submission to the forward's beginning.
        """
        if phase != "denoise" or len(riders) < 2:
            return
        seen = {request_id: self._aboard.get(request_id) for request_id in riders}
        traces = {one.trace: None for one in seen.values() if one is not None}
        for request_id, one in seen.items():
            if one is None:
                continue
            for trace in traces if len(one.others) < MOST_OTHERS else ():
                one.meet(trace)
            kept = one.first if len(one.first) < MOST_FORWARDS // 2 else one.last
            kept.append({"at_s": riders[request_id], "rows": rows, "requests": len(riders)})

    def left(self, request_id: str) -> dict[str, Any]:
        """A request has ended: gives what was noted of it, and forgets it.

        Returns:
            `others`: their traces. `forwards`: `at_s` since submission, `rows`, `requests`.
        """
        one = self._aboard.pop(request_id, None)
        if one is None:
            return {"others": [], "forwards": []}
        return {"others": list(one.others), "forwards": [*one.first, *one.last]}
