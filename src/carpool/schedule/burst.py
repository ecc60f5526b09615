"""Choose the width of the forwards of a burst: requests that came at once.

No later request fills the last round of a burst. So the seconds of rounds give the end of the last
request and the mean end, and both should be as early as in a mode with fixed batches. The width
with the least larger miss is taken: of its last end over the earliest of any width, and of its mean
over the mean that is asked for.

Equal requests are a burst whether or not others may come: as long as it lasts, all its requests
count, finished ones too, and the rest is never split anew. Different requests are a burst only
where hardly any others are likely to come; their ends are simulated for every width, each finished
request making room for the next (list scheduling).

Sources: the weighted Chebyshev method for two objectives, Bowman, On the Relationship of the
Tchebycheff Norm and the Efficient Frontier of Multiple-Criteria Objectives, 1976; list scheduling,
Graham, Bounds for Certain Multiprocessing Anomalies, Bell System Technical Journal 45, 1966.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from math import inf

from carpool.schedule.views import ParkedCall

SLOWER = 1.04  # times: so much later the mean may be before it counts as a miss
SLOWER_MIXED = 1.03  # the same for different requests, over the least mean of any width
LEAST_CALLS = 4  # fewer are no burst
MOST_CALLS = 64  # of different requests: simulating more of them takes too long

Ends = tuple[float, float]
"""When the last of some calls is done, and when the mean one, seconds."""


def came_at_once(calls: Sequence[ParkedCall], round_s: float) -> bool:
    """Whether calls are of requests that came within a round."""
    arrived = [call.arrived_s for call in calls]
    return max(arrived) - min(arrived) <= round_s


def are_equal(calls: Sequence[ParkedCall]) -> bool:
    """Whether calls are of requests that have the same to do in all."""
    return len({call.steps for call in calls}) == 1


def best_width(seconds: Sequence[float], calls: int) -> int:
    """The calls of a forward, for a burst of equal requests that is done in rounds.

    Its mean is to be no later than one by one, or in forwards as wide as may be: whichever is less.

    Args:
        seconds: of a turn of 1, 2, ... calls: those that a forward may have.
        calls: of the whole burst.
    """
    ends = [_ends(seconds, calls, n) for n in range(1, len(seconds) + 1)]
    return _nearest(ends, SLOWER * min(ends[0][1], ends[-1][1]))


def best_width_of_mixed(seconds: Sequence[float], left_s: Sequence[float], waited_s: float) -> int:
    """The same for requests that have different work left; the mean is to be near the least.

    Both count from their arrival: what is left of a burst weighs less and less.

    Args:
        left_s: the work of each, alone, in the order in which they are taken; at least a turn is
            left of a call that waits for one, whatever was predicted.
        waited_s: since they came.
    """
    slower = [turn_s / seconds[0] for turn_s in seconds]
    left_s = [max(work_s, seconds[0]) for work_s in left_s]
    played = [_played(slower, left_s, n) for n in range(1, len(seconds) + 1)]
    ends = [(waited_s + end_s, waited_s + mean_s) for end_s, mean_s in played]
    return _nearest(ends, SLOWER_MIXED * min(mean_s for _, mean_s in ends))


def _nearest(ends: Sequence[Ends], wanted_s: float) -> int:
    """The width whose larger miss is the least.

    Args:
        ends: of widths 1, 2, ...
        wanted_s: a later mean is a miss.
    """
    soonest_s, _ = min(ends)
    best, least = 0, (inf, inf)
    for n, (end_s, mean_s) in enumerate(ends, 1):
        misses = max(end_s / soonest_s, mean_s / wanted_s), mean_s
        if misses <= least:  # of equal ones the wider
            best, least = n, misses
    return best


def trial_s(seconds: Sequence[float], best: int, tried: int) -> float:
    """Seconds by which a burst ends later if one round has another width than the best."""
    more = best - tried
    if more > 0:  # those who are left out take a round of their own
        return seconds[tried - 1] + seconds[more - 1] - seconds[best - 1]
    rest_s = seconds[best + more - 1] if best + more > 0 else 0.0
    return seconds[tried - 1] + rest_s - 2 * seconds[best - 1]


def _ends(seconds: Sequence[float], calls: int, width: int) -> Ends:
    """Of so many equal calls, in rounds of a width."""
    full, left = divmod(calls, width)
    round_s = seconds[width - 1]
    end_s = full * round_s + (seconds[left - 1] if left else 0.0)
    return end_s, (width * round_s * full * (full + 1) / 2 + left * end_s) / calls


def _played(slower: Sequence[float], left_s: Sequence[float], width: int) -> Ends:
    """Simulate calls with different work left, in turns of a width: each finished one makes room.

    Args:
        slower: what a turn of 1, 2, ... calls takes, in turns of one.
    """
    now_s, done_s, sum_s = 0.0, 0.0, 0.0
    running: list[float] = []  # the work, alone, that each in the forward has done when it ends
    for work_s in left_s:
        if len(running) < width:
            heappush(running, work_s)
            continue
        ended_s = heapreplace(running, running[0] + work_s)
        now_s += (ended_s - done_s) * slower[width - 1]
        sum_s, done_s = sum_s + now_s, ended_s
    while running:
        turn = slower[len(running) - 1]
        ended_s = heappop(running)
        now_s += (ended_s - done_s) * turn
        sum_s, done_s = sum_s + now_s, ended_s
    return now_s, sum_s / len(left_s)
