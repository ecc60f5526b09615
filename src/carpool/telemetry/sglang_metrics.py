"""Log lines of `--enable-batching-metrics`: one per batch, and a summary after every fifth.

The lines are those of SGLang-Diffusion 0.5.23, which its users parse:

    Dynamic batch dispatch: requests=2, outputs=2/8, user_max_outputs=8, queue_wait=5.12ms, ...
    Dynamic batch stats (last 5 dispatches): avg_requests=2.80, avg_outputs=2.80, ...

or, with `--batching-metrics-format docs`, the older ones of its documentation:

    Dynamic batch dispatch: size=2/8, user_max=8, queue_wait=5.12ms, stop_reason=delay
    Dynamic batch stats (last 5 dispatches): avg_size=2.80, merged_rate=60.0%, ...

Counting does not depend on logging: `summary` has the same figures since the start. Sizes are
outputs. This module has no clock and writes nothing itself.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.settings.engine import MetricsFormat

SUMMARY_EVERY = 5  # dispatches
TOP_REJECTS = 5  # reasons in a summary


@dataclass(slots=True)
class _Counts:
    """Sums over dispatches."""

    dispatches: int = 0
    requests: int = 0
    outputs: int = 0
    filled: int = 0  # outputs up to the cap: a lone request above its cap counts as the cap
    capacity: int = 0  # sum of the caps
    merged: int = 0  # dispatches of several requests
    full: int = 0
    waited_s: float = 0.0
    rejects: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, size: int, cap: int, requests: int, wait_s: float, *, can_fill: bool) -> None:
        self.dispatches += 1
        self.requests += requests
        self.outputs += size
        self.filled += min(size, cap)
        self.capacity += cap
        self.merged += requests > 1
        self.full += can_fill and size >= cap
        self.waited_s += wait_s

    def figures(self) -> dict[str, float]:
        """Averages and shares, 0 before the first dispatch."""
        count = max(self.dispatches, 1)
        return {
            "avg_size": self.outputs / count,
            "merged_rate": self.merged / count,
            "full_rate": self.full / count,
            "utilization": self.filled / max(self.capacity, 1),
            "wait_avg_s": self.waited_s / count,
        }


class Dispatches:
    """Counts batches as they leave."""

    def __init__(self, form: MetricsFormat = "current") -> None:
        self._form = form
        self._totals, self._last = _Counts(), _Counts()
        self._waits_s: list[float] = []  # since the last summary line

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
            cap: max outputs: the smallest of the user's and the rules' caps, or its own outputs if
                it could not be merged.
            user_max: `--batching-max-size`, outputs; at 1, no batch counts as full.
            wait_s: wait of its head, seconds.
            stop_reason: why it is no larger, from `batches.fill`.
            rejects: why queued requests did not join, with counts.
            requests: number of requests; default: the number of outputs.

        Returns:
            Lines for the log: one for the dispatch, and a summary after every fifth.
        """
        requests = size if requests is None else requests
        for counts in (self._totals, self._last):
            counts.add(size, cap, requests, wait_s, can_fill=user_max > 1)
        self._waits_s.append(wait_s)
        self._last.rejects.update(rejects)
        self._totals.stop_reasons[_reason_group(stop_reason)] += 1
        for reason, count in rejects.items():
            self._totals.rejects[_reason_group(reason)] += count
        if self._form == "docs":
            sizes = f"size={size}/{cap}, user_max={user_max}"
        else:
            sizes = f"requests={requests}, outputs={size}/{cap}, user_max_outputs={user_max}"
        waited = f"queue_wait={wait_s * 1000:.2f}ms"
        lines = [f"Dynamic batch dispatch: {sizes}, {waited}, stop_reason={stop_reason}"]
        return lines if self._last.dispatches < SUMMARY_EVERY else [*lines, *self.window()]

    def window(self) -> list[str]:
        """Log lines that summarise the dispatches since the last summary; empty without any."""
        counts, self._last = self._last, _Counts()
        waits_s, self._waits_s = sorted(self._waits_s), []
        return [self._summary_line(counts, waits_s)] if counts.dispatches else []

    def summary(self) -> dict[str, Any]:
        """Counts since the start.

        Rates are shares from 0 to 1. Reasons are counted without their numbers.
        """
        counts = self._totals
        return {
            "dispatches": counts.dispatches,
            "requests": counts.requests,
            "outputs": counts.outputs,
            **counts.figures(),
            "stop_reasons": dict(counts.stop_reasons),
            "rejects": dict(counts.rejects),
        }

    def _summary_line(self, counts: _Counts, waits_s: list[float]) -> str:
        figures, count = counts.figures(), counts.dispatches
        top = counts.rejects.most_common(TOP_REJECTS)
        sizes, utilization = f"avg_size={figures['avg_size']:.2f}", figures["utilization"]
        if self._form == "current":
            sizes = f"avg_requests={counts.requests / count:.2f}, "
            sizes += f"avg_outputs={counts.outputs / count:.2f}"
            utilization = counts.outputs / max(counts.capacity, 1)
        p95_s = waits_s[math.ceil(0.95 * count) - 1]
        return (
            f"Dynamic batch stats (last {count} dispatches): {sizes}, "
            f"merged_rate={figures['merged_rate']:.1%}, full_rate={figures['full_rate']:.1%}, "
            f"utilization={utilization:.1%}, wait_avg={figures['wait_avg_s'] * 1000:.2f}ms, "
            f"wait_p95={p95_s * 1000:.2f}ms, "
            f"top_rejects={', '.join(f'{reason}={count}' for reason, count in top) or 'none'}"
        )


def _reason_group(reason: str) -> str:
    """The reason without its numbers, to bound the number of different reasons."""
    return reason.partition(":")[0]


def started(user_max: int, device_memory_gib: float | None, rules: int) -> list[str]:
    """Log lines at the start of mode `dynamic`."""
    admission = (
        f"Batch admission enabled: user_max={user_max}, "
        f"device_memory={device_memory_gib or 0.0:.1f}GiB, rules={rules}"
    )
    metrics = f"Dynamic batch metrics enabled; logging summary every {SUMMARY_EVERY} dispatches."
    return [admission, metrics] if user_max > 1 else [metrics]


def processed(requests: int, user_max: int, delay_s: float) -> str:
    """Log line when a batch of several requests is done."""
    delay = f"max_delay={delay_s * 1000:.2f}ms"
    return f"Processed dynamic batch of {requests}/{user_max} request(s) with {delay}"
