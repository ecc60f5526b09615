"""Requests that wait for a worker, and the order in which they are bound; see `router`.

The order is the engine's (`schedule.rank`); with shares, the tenant with the least service for its
weight in the whole fleet goes first.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from math import inf

from msgspec.structs import replace

from carpool.fleet.worker_load import RoutedRequest
from carpool.schedule.fair_shares import FairShares
from carpool.schedule.rank import Rank, rank


class WaitingRequests:
    """The waiting requests, by number.

    Args:
        work_s: predicts the seconds of a request's steps, alone.
        shares: weights of tenants; None: no fair shares.
    """

    def __init__(self, work_s: Callable[[RoutedRequest], float], shares: FairShares | None) -> None:
        self._work_s, self._shares = work_s, shares
        self._requests: dict[int, RoutedRequest] = {}  # with their work as predicted at arrival
        self._orders: dict[Hashable, list[Rank]] = {}
        self.steps = Counter[Hashable]()  # totals by kind

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def __getitem__(self, number: int) -> RoutedRequest:
        return self._requests[number]

    def __iter__(self) -> Iterator[RoutedRequest]:
        """All requests, in order of arrival."""
        return iter(self._requests.values())

    def add(self, work: RoutedRequest) -> None:
        self._requests[work.request] = work = self._predicted(work)
        insort(self._orders.setdefault(self._order(work), []), _plain_rank(work))
        self.steps[work.kind] += work.steps

    def remove(self, number: int) -> None:
        work = self._requests.pop(number)
        ranks = self._orders[order := self._order(work)]
        del ranks[bisect_left(ranks, _plain_rank(work))]
        if not ranks:
            del self._orders[order]
        self.steps[work.kind] -= work.steps
        if not self.steps[work.kind]:
            del self.steps[work.kind]

    @property
    def first(self) -> RoutedRequest | None:
        """The next request to bind, without regard to deadlines and shares."""
        ranks = [ranks[0] for ranks in self._orders.values()]
        return self[int(min(ranks)[-1])] if ranks else None

    def goes_before(self, first: RoutedRequest, second: RoutedRequest) -> bool:
        """Whether the first of two waiting requests is bound first."""
        return _plain_rank(self._predicted(first)) < _plain_rank(self._predicted(second))

    def firsts(self, now_s: float, limit: int) -> Iterator[RoutedRequest]:
        """The first request of every order, sorted by rank."""
        firsts = [self._requests[int(ranks[0][-1])] for ranks in self._orders.values()]
        if len(firsts) > 1:
            key = partial(rank, now_s=now_s, shares=self._shares)
            firsts = heapq.nsmallest(limit, firsts, key=key)
        return iter(firsts)

    def count_shares(self, bound: Iterable[RoutedRequest]) -> None:
        """Update the tenants with work: those of waiting and bound requests."""
        if self._shares is not None:
            self._shares.queued([*self, *bound])

    def charge(self, work: RoutedRequest) -> None:
        """Charge a bound request to its tenant."""
        if self._shares is not None:
            self._shares.charge(work, self._work_s(work))

    def _predicted(self, work: RoutedRequest) -> RoutedRequest:
        work_s = self._work_s(work)
        return replace(work, left_s=work_s, whole_s=work_s)

    def _order(self, work: RoutedRequest) -> Hashable:
        """Within one order, the lowest rank goes first."""
        share = (work.tenant, work.user) if self._shares is not None else None
        # a deadline's rank changes with time: such a request has its own order
        return work.kind, share, work.request if work.deadline_s < inf else None


def _plain_rank(work: RoutedRequest) -> Rank:
    """The rank without deadlines and shares."""
    return rank(replace(work, deadline_s=inf), 0.0)
