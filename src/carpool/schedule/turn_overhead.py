"""Overhead of a loop turn outside its forward: a fixed part, and a part for each call.

Calls that share a turn share the fixed part; that matters for short forwards. Each part is the
median of the last turns.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from carpool.schedule.estimator import RECENT


def _empty() -> deque[float]:
    return deque(maxlen=RECENT)


@dataclass(slots=True)
class TurnOverhead:
    """The overhead of turns of one kind of call."""

    _loop: deque[float] = field(default_factory=_empty)
    _samples: deque[float] = field(default_factory=_empty)  # seconds per call
    _until: int = 0  # turns until the medians are recomputed
    loop_s: float = 0.0
    own_s: float = 0.0

    def learn(self, loop_s: float, own_s: float) -> None:
        """Record a turn; `own_s` is per call."""
        self._loop.append(loop_s)
        self._samples.append(own_s)
        self._until -= 1
        if self._until <= 0:
            self.loop_s = statistics.median(self._loop)
            self.own_s = statistics.median(self._samples)
            self._until = min(RECENT // 3, len(self._loop))

    def seconds(self, calls: int) -> float:
        return self.loop_s + calls * self.own_s

    def to_json(self) -> dict[str, Any]:
        return {"loop_s": self.loop_s, "own_s": self.own_s}
