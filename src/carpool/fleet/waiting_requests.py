"""Requests that wait for a worker, and the order in which they are bound; see `router`.

The order is that of `schedule.continuous`: predicted work, aged by the arrival, with priorities;
first deadlines that press; with shares, the tenant that the whole fleet served least by its weight.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from carpool.fleet.worker_load import RoutedRequest
from carpool.schedule.continuous import AGEING, PRESSING, PRIORITY
from carpool.schedule.fair_shares import FairShares
from carpool.schedule.views import QueuedRequest


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits, with its rank as predicted when it came."""

    work: RoutedRequest
    work_s: float
    order: Hashable  # of those of one order, the one with the lowest rank goes first

    @property
    def key(self) -> tuple[float, int]:
        """The rank while nobody has a deadline or a share."""
        work, work_s = self.work, self.work_s
        return work_s + AGEING * work.arrived_s - work.priority * PRIORITY * work_s, work.request


class WaitingRequests:
    """The requests that wait, by their numbers.

    Args:
        work_s: predicts the seconds of a request's steps, alone.
        shares: of tenants; None: not fair.
    """

    def __init__(self, work_s: Callable[[RoutedRequest], float], shares: FairShares | None) -> None:
        self._work_s, self._shares = work_s, shares
        self._requests: dict[int, _Waiting] = {}
        self._orders: dict[Hashable, list[tuple[float, int]]] = {}  # ranks, and requests
        self.steps = Counter[Hashable]()  # of all, by kind

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def __getitem__(self, number: int) -> RoutedRequest:
        return self._requests[number].work

    def __iter__(self) -> Iterator[RoutedRequest]:
        """All, in the order in which they came."""
        return (one.work for one in self._requests.values())

    def add(self, work: RoutedRequest) -> None:
        one = self._ranked(work)
        self._requests[work.request] = one
        insort(self._orders.setdefault(one.order, []), one.key)
        self.steps[work.kind] += work.steps

    def remove(self, number: int) -> None:
        one = self._requests.pop(number)
        ranks = self._orders[one.order]
        del ranks[bisect_left(ranks, one.key)]
        if not ranks:
            del self._orders[one.order]
        self.steps[one.work.kind] -= one.work.steps
        if not self.steps[one.work.kind]:
            del self.steps[one.work.kind]

    def longest_first(self) -> list[RoutedRequest]:
        ranked = sorted(self._requests.values(), key=lambda one: (-one.work_s, one.work.request))
        return [one.work for one in ranked]

    @property
    def first(self) -> RoutedRequest | None:
        """The request that is bound next, if any worker has room; deadlines and shares aside."""
        ranks = [ranks[0] for ranks in self._orders.values()]
        return self[min(ranks)[1]] if ranks else None

    def goes_before(self, one: RoutedRequest, other: RoutedRequest) -> bool:
        """Whether the first of two requests is bound first if both wait."""
        return self._ranked(one).key < self._ranked(other).key

    def firsts(self, now_s: float, most: int) -> Iterator[RoutedRequest]:
        """The first of every order, those first that are to be served first."""
        firsts = [self._requests[ranks[0][1]] for ranks in self._orders.values()]
        if len(firsts) > 1:
            firsts = heapq.nsmallest(most, firsts, key=lambda one: self._rank(one, now_s))
        return (one.work for one in firsts)

    def count_shares(self, bound: Iterable[RoutedRequest]) -> None:
        """Say who has work now: those that wait, and those that are bound."""
        if self._shares is not None:
            self._shares.queued([_queued(work) for work in (*self, *bound)])

    def charge(self, work: RoutedRequest) -> None:
        """A request was bound: its tenant is served."""
        if self._shares is not None:
            self._shares.charge(_queued(work), self._work_s(work))

    def _ranked(self, work: RoutedRequest) -> _Waiting:
        share = (work.tenant, work.user) if self._shares is not None else None
        # deadlines press as time passes: such a request has an order of its own
        dated = work.request if work.deadline_s < inf else None
        return _Waiting(work, self._work_s(work), (work.kind, work.needs, share, dated))

    def _rank(self, one: _Waiting, now_s: float) -> tuple[float, ...]:
        """As `Continuous._rank`."""
        work, pressing, share = one.work, inf, (0.0, 0.0)
        if work.deadline_s < inf:
            slack_s = work.deadline_s - now_s - one.work_s
            pressing = slack_s if 0 <= slack_s < PRESSING * one.work_s else inf
        if self._shares is not None:
            share = self._shares.rank(_queued(work))
        return share[0], pressing, share[1], *one.key


def _queued(work: RoutedRequest) -> QueuedRequest:
    """As the shares see it."""
    return QueuedRequest(request=work.request, tenant=work.tenant, user=work.user)
