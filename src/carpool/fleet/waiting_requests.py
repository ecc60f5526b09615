"""Requests that wait for a worker, and the order in which they are bound; see `router`.

The order is the engine's (`schedule.rank`); with shares, the tenant with the least service for its
weight in the whole fleet goes first.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from carpool.fleet.worker_load import RoutedRequest
from carpool.schedule.fair_shares import FairShares
from carpool.schedule.rank import Rank, rank
from carpool.schedule.views import QueuedRequest


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting request, with its work as predicted at arrival."""

    work: RoutedRequest
    view: QueuedRequest
    order: Hashable  # within one order, the lowest rank goes first

    @property
    def work_s(self) -> float:
        return self.view.left_s

    @property
    def key(self) -> Rank:
        """The rank without deadlines and shares."""
        return rank(_view(replace(self.work, deadline_s=inf), self.work_s), 0.0)


class WaitingRequests:
    """The waiting requests, by number.

    Args:
        work_s: predicts the seconds of a request's steps, alone.
        shares: weights of tenants; None: no fair shares.
    """

    def __init__(self, work_s: Callable[[RoutedRequest], float], shares: FairShares | None) -> None:
        self._work_s, self._shares = work_s, shares
        self._requests: dict[int, _Waiting] = {}
        self._orders: dict[Hashable, list[Rank]] = {}
        self.steps = Counter[Hashable]()  # totals by kind

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def __getitem__(self, number: int) -> RoutedRequest:
        return self._requests[number].work

    def __iter__(self) -> Iterator[RoutedRequest]:
        """All requests, in order of arrival."""
        return (entry.work for entry in self._requests.values())

    def add(self, work: RoutedRequest) -> None:
        entry = self._ranked(work)
        self._requests[work.request] = entry
        insort(self._orders.setdefault(entry.order, []), entry.key)
        self.steps[work.kind] += work.steps

    def remove(self, number: int) -> None:
        entry = self._requests.pop(number)
        ranks = self._orders[entry.order]
        del ranks[bisect_left(ranks, entry.key)]
        if not ranks:
            del self._orders[entry.order]
        self.steps[entry.work.kind] -= entry.work.steps
        if not self.steps[entry.work.kind]:
            del self.steps[entry.work.kind]

    @property
    def first(self) -> RoutedRequest | None:
        """The next request to bind, without regard to deadlines and shares."""
        ranks = [ranks[0] for ranks in self._orders.values()]
        return self[int(min(ranks)[-1])] if ranks else None

    def goes_before(self, first: RoutedRequest, second: RoutedRequest) -> bool:
        """Whether the first of two waiting requests is bound first."""
        return self._ranked(first).key < self._ranked(second).key

    def firsts(self, now_s: float, limit: int) -> Iterator[RoutedRequest]:
        """The first request of every order, sorted by rank."""
        firsts = [self._requests[int(ranks[0][-1])] for ranks in self._orders.values()]
        if len(firsts) > 1:
            firsts = heapq.nsmallest(limit, firsts, key=lambda entry: self._rank(entry, now_s))
        return (entry.work for entry in firsts)

    def count_shares(self, bound: Iterable[RoutedRequest]) -> None:
        """Update the tenants with work: those of waiting and bound requests."""
        if self._shares is not None:
            self._shares.queued([_view(work) for work in (*self, *bound)])

    def charge(self, work: RoutedRequest) -> None:
        """Charge a bound request to its tenant."""
        if self._shares is not None:
            self._shares.charge(_view(work), self._work_s(work))

    def _ranked(self, work: RoutedRequest) -> _Waiting:
        share = (work.tenant, work.user) if self._shares is not None else None
        # a deadline's rank changes with time: such a request has its own order
        dated = work.request if work.deadline_s < inf else None
        return _Waiting(work, _view(work, self._work_s(work)), (work.kind, share, dated))

    def _rank(self, waiting: _Waiting, now_s: float) -> Rank:
        return rank(waiting.view, now_s, shares=self._shares)


def _view(work: RoutedRequest, work_s: float = 0.0) -> QueuedRequest:
    """The engine policy's view of a request."""
    return QueuedRequest(
        work.request, work.arrived_s, left_s=work_s, whole_s=work_s, deadline_s=work.deadline_s,
        priority=work.priority, tenant=work.tenant, user=work.user,
    )  # fmt: skip
