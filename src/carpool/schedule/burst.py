"""How wide the forwards of a burst are: of equal requests that came at once.

They have equally much to do, and nobody comes who would fill the last round. So what rounds take
says when the last of them ends, and the mean one; both are to be as early as in a mode with fixed
batches. The width is taken whose larger miss is the least: of its last end over the earliest of any
width, and of its mean over that of one by one, or of forwards as wide as may be, whichever is less.
As long as a burst lasts it counts with all its requests, those that are done, too: what is left of
it is never split anew.

Source: the weighted Chebyshev method for two objectives, Bowman, On the Relationship of the
Tchebycheff Norm and the Efficient Frontier of Multiple-Criteria Objectives, 1976.
"""

from collections.abc import Sequence

from carpool.types import ParkedCall

SLOWER = 1.04  # times: so much later the mean may be before it counts as a miss
LEAST_CALLS = 4  # fewer are no burst


def is_burst(line: Sequence[ParkedCall], round_s: float) -> bool:
    """Whether calls are of equal requests that came within a round."""
    arrived = [call.arrived_s for call in line]
    return max(arrived) - min(arrived) <= round_s and len({call.steps for call in line}) == 1


def best_width(seconds: Sequence[float], calls: int) -> int:
    """The calls of a forward, for a burst that is done in rounds.

    Args:
        seconds: of a turn of 1, 2, ... calls: those that a forward may have.
        calls: of the whole burst.
    """
    ends = [_ends(seconds, calls, n) for n in range(1, len(seconds) + 1)]
    soonest_s = min(end_s for end_s, _ in ends)
    least_s = min(ends[0][1], ends[-1][1])

    def misses(n: int) -> tuple[float, float, int]:
        end_s, mean_s = ends[n - 1]
        return max(end_s / soonest_s, mean_s / (SLOWER * least_s)), mean_s, -n

    return min(range(1, len(seconds) + 1), key=misses)


def trial_s(seconds: Sequence[float], best: int, tried: int) -> float:
    """What a burst ends later by if one round has another width than the best."""
    more = best - tried
    if more > 0:  # those who are left out take a round of their own
        return seconds[tried - 1] + seconds[more - 1] - seconds[best - 1]
    rest_s = seconds[best + more - 1] if best + more > 0 else 0.0
    return seconds[tried - 1] + rest_s - 2 * seconds[best - 1]


def _ends(seconds: Sequence[float], calls: int, width: int) -> tuple[float, float]:
    """When the last of so many calls is done, and when the mean one, in rounds of a width."""
    full, left = divmod(calls, width)
    round_s = seconds[width - 1]
    end_s = full * round_s + (seconds[left - 1] if left else 0.0)
    return end_s, (width * round_s * full * (full + 1) / 2 + left * end_s) / calls
