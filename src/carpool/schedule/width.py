"""The width rule: how many calls of one key share a forward, by the mean of rounds.

With n requests' worth of work in the engine, of which w share a forward in t(w) seconds a step, the
work is done in rounds of w, and the mean request is done after (n + w) / 2 of them times t(w) / w.
The width with the least mean is taken: 1 when rows gain nothing and few wait, the widest that gains
anything when many wait. n counts the requests that are there and those that are likely to come
before the engine is empty (`arrivals.py`).

The engine's `continuous` and the fleet's router use the same function. The rule is our own:
ARCHITECTURE.md.
"""

from collections.abc import Iterable
from math import inf

LONG_QUEUE = 20  # requests: with so many, every row that gains anything is worth it


def best_width(
    turns: Iterable[tuple[int, float]],
    backlog: float,
    min_gain: float,
    *,
    is_burst: bool = False,
) -> int:
    """The number of calls with the least mean of rounds.

    Args:
        turns: rows and seconds of a turn of 1 call, of 2 calls, and so on.
        backlog: work in the engine, in requests like these.
        min_gain: a row more must raise the requests a second by this part, unless many wait.
        is_burst: no others are expected before these are done. Then every gain counts, and the end
            of the last request, n rounds of t(w) / w, counts 15 times as much as the mean.
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
