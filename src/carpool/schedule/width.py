"""The width rule: the number of calls in a forward that minimises the mean completion time.

Let the engine hold n requests' worth of work, and let w of them share a forward of t(w) seconds a
step. The work runs in rounds of w, and the mean completion time is (n + w) / 2 times t(w) / w. The
rule takes the width with the least mean: 1 when rows gain nothing and the queue is short, the
widest with any gain when it is long. n counts the requests in the engine and those likely to arrive
before it is empty (`arrivals.py`).

The engine's `continuous` and the fleet's router use this function. The rule is our own:
ARCHITECTURE.md.
"""

from collections.abc import Iterable
from math import inf

LONG_QUEUE = 20  # requests: in a longer queue any gain of a row justifies it


def best_width(
    turns: Iterable[tuple[int, float]],
    backlog: float,
    min_gain: float,
    *,
    is_burst: bool = False,
) -> int:
    """The number of calls with the least mean completion time.

    Args:
        turns: rows and seconds of a turn of 1 call, 2 calls, and so on.
        backlog: work in the engine, in requests like these.
        min_gain: one more row must raise the throughput by this share, unless the queue is long.
        is_burst: no arrivals are expected before these calls are done. Then every gain counts, and
            the end of the last request, n rounds of t(w) / w, counts 15 times as much as the mean.
    """
    queue = 16 * backlog if is_burst else backlog
    width, least_s, throughput, gainful_rows = 1, inf, 0.0, 0
    for calls, (rows, seconds) in enumerate(turns, 1):
        if calls > 1 and backlog < LONG_QUEUE and not is_burst:
            gain = calls / seconds / throughput - 1
            if gain <= min_gain * (rows - gainful_rows):
                continue
        throughput, gainful_rows = calls / seconds, rows
        mean_s = seconds * (max(queue, calls) + calls) / calls
        if mean_s < least_s:
            width, least_s = calls, mean_s
    return width
