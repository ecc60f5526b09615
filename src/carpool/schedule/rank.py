"""Order of requests: shortest predicted work first, aged by arrival; priority, deadlines, shares.

The engine's `continuous` and the fleet's router use this function.

Source: ageing, Silberschatz, Operating System Concepts, 2018.
"""

from math import inf

from carpool.schedule.fair_shares import FairShares
from carpool.schedule.views import ParkedCall, QueuedRequest

AGEING = 3.0  # seconds of work that offset one second of waiting
PRIORITY = 4.0  # times a request's whole work that one priority level offsets

Rank = tuple[float, ...]


def rank(
    request: ParkedCall | QueuedRequest,
    now_s: float,
    slowdown: float = 1.0,
    shares: FairShares | None = None,
) -> Rank:
    """The sort key of a request; arrival breaks ties.

    Args:
        now_s: on the clock of `arrived_s` and `deadline_s`.
        slowdown: current seconds of work over predicted seconds.
        shares: weights of tenants; None: no fair shares.
    """
    urgency = inf
    if request.deadline_s < inf:
        left_s = request.left_s * slowdown
        slack_s = request.deadline_s - now_s - left_s
        # a request that is already late gains nothing by going first
        urgency = slack_s if 0 <= slack_s < left_s else inf
    tenant_s, user_s = (0.0, 0.0) if shares is None else shares.rank(request)
    bonus_s = request.priority * PRIORITY * request.whole_s
    work_s = request.left_s + AGEING * request.arrived_s - bonus_s
    return tenant_s, urgency, user_s, work_s, request.request


def is_urgent(rank: Rank) -> bool:
    """Whether the request goes first because of its deadline."""
    return rank[1] < inf
