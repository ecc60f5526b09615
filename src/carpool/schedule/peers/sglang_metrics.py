"""What `--enable-batching-metrics` prints: a line a batch, and a summary after every fifth.

The lines have the form that SGLang-Diffusion's users read by machine:

    Dynamic batch dispatch: size=2/8, user_max=8, queue_wait=5.12ms, stop_reason=delay
    Dynamic batch stats (last 5 dispatches): avg_size=2.80, merged_rate=60.0%, ...

Counting does not depend on whether anybody prints: `summary` has the same figures since the start.
Sizes are outputs. Knows no clock and writes nothing itself.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SUMMARY_EVERY = 5  # dispatches
KEPT_WAITS = 1000  # the newest, for the percentile
TOP_REJECTS = 5


@dataclass(slots=True)
class _Tally:
    """Sums over dispatches."""

    dispatches: int = 0
    requests: int = 0
    outputs: int = 0
    used: int = 0  # outputs within the caps: a lone request above its cap fills it, no more
    capacity: int = 0  # sum of the caps
    merged: int = 0  # dispatches of several requests
    full: int = 0
    waited_s: float = 0.0
    waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))
    rejects: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, size: int, cap: int, requests: int, wait_s: float) -> None:
        self.dispatches += 1
        self.requests += requests
        self.outputs += size
        self.used += min(size, cap)
        self.capacity += cap
        self.merged += requests > 1
        self.full += size >= cap
        self.waited_s += wait_s
        self.waits_s.append(wait_s)

    def figures(self) -> dict[str, float]:
        """Averages and shares, 0 before the first dispatch."""
        count = max(self.dispatches, 1)
        ordered = sorted(self.waits_s) or [0.0]
        return {
            "avg_size": self.outputs / count,
            "merged_rate": self.merged / count,
            "full_rate": self.full / count,
            "utilization": self.used / max(self.capacity, 1),
            "wait_avg_s": self.waited_s / count,
            "wait_p95_s": ordered[math.ceil(0.95 * len(ordered)) - 1],
        }


class Dispatches:
    """Counts batches as they leave."""

    def __init__(self) -> None:
        self._all, self._last = _Tally(), _Tally()

    def record(
        self,
        size: int,
        cap: int,
        user_max: int,
        wait_s: float,
        stop_reason: str,
        rejects: Mapping[str, int],
        *,
        requests: int | None = None,
    ) -> list[str]:
        """Count one batch.

        Args:
            size: outputs in it.
            cap: outputs it could have had: the smallest of the user's and the rules' caps.
            user_max: `--batching-max-size`, outputs.
            wait_s: how long its head has waited, seconds.
            stop_reason: why it is no larger, from `batches.fill`.
            rejects: why others in line did not join, with how many.
            requests: in it; as many as outputs, unless said.

        Returns:
            Lines for the log: the dispatch's, and after every fifth one the summary of those five.
        """
        for tally in (self._all, self._last):
            tally.add(size, cap, size if requests is None else requests, wait_s)
        self._last.rejects.update(rejects)
        self._all.stop_reasons[_kind(stop_reason)] += 1
        for reason, count in rejects.items():
            self._all.rejects[_kind(reason)] += count
        lines = [
            f"Dynamic batch dispatch: size={size}/{cap}, user_max={user_max}, "
            f"queue_wait={wait_s * 1000:.2f}ms, stop_reason={stop_reason}"
        ]
        if self._last.dispatches == SUMMARY_EVERY:
            lines.append(_summary_line(self._last))
            self._last = _Tally()
        return lines

    def summary(self) -> dict[str, Any]:
        """Counts since the start; the 95th percentile is that of the newest thousand waits.

        Rates are shares from 0 to 1. Reasons are counted by their kind, without their numbers.
        """
        tally = self._all
        return {
            "dispatches": tally.dispatches,
            "requests": tally.requests,
            "outputs": tally.outputs,
            **tally.figures(),
            "stop_reasons": dict(tally.stop_reasons),
            "rejects": dict(tally.rejects),
        }


def _summary_line(tally: _Tally) -> str:
    figures = tally.figures()
    top = tally.rejects.most_common(TOP_REJECTS)
    return (
        f"Dynamic batch stats (last {tally.dispatches} dispatches): "
        f"avg_size={figures['avg_size']:.2f}, merged_rate={figures['merged_rate']:.1%}, "
        f"full_rate={figures['full_rate']:.1%}, utilization={figures['utilization']:.1%}, "
        f"wait_avg={figures['wait_avg_s'] * 1000:.2f}ms, "
        f"wait_p95={figures['wait_p95_s'] * 1000:.2f}ms, "
        f"top_rejects={', '.join(f'{reason}={count}' for reason, count in top) or 'none'}"
    )


def _kind(reason: str) -> str:
    """The reason without its numbers, of which there may be any number of different ones."""
    return reason.partition(":")[0]
