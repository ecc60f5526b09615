"""Requests that wait for a worker, and the order in which they are bound; see `router`.

The order is that of the engine (`schedule.rank`); with shares the tenant goes first that the whole
fleet served least for its weight.
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
    """A request that waits, with its work as predicted when it came."""

    work: RoutedRequest
    view: QueuedRequest
    order: Hashable  # of those of one order, the one with the lowest rank goes first

    @property
    def work_s(self) -> float:
        return self.view.left_s

    @property
    def key(self) -> Rank:
        """The rank, deadlines and shares aside."""
        return rank(_view(replace(self.work, deadline_s=inf), self.work_s), 0.0)


class WaitingRequests:
    """The requests that wait, by their numbers.

    Args:
        work_s: predicts the seconds of a request's steps, alone.
        shares: of tenants; None: not fair.
    """

    def __init__(self, work_s: Callable[[RoutedRequest], float], shares: FairShares | None) -> None:
        self._work_s, self._shares = work_s, shares
        self._requests: dict[int, _Waiting] = {}
        self._orders: dict[Hashable, list[Rank]] = {}
        self.steps = Counter[Hashable]()  # of all, by kind

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def __getitem__(self, number: int) -> RoutedRequest:
        return self._requests[number].work

    def __iter__(self) -> Iterator[RoutedRequest]:
        """All, in the order in which they came."""
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
        """The request that is bound next, if any worker has room; deadlines and shares aside."""
        ranks = [ranks[0] for ranks in self._orders.values()]
        return self[int(min(ranks)[-1])] if ranks else None

    def goes_before(self, first: RoutedRequest, second: RoutedRequest) -> bool:
        """Whether the first of two requests is bound first if both wait."""
        return self._ranked(first).key < self._ranked(second).key

    def firsts(self, now_s: float, limit: int) -> Iterator[RoutedRequest]:
        """The first of every order, those first that are to be served first."""
        firsts = [self._requests[int(ranks[0][-1])] for ranks in self._orders.values()]
        if len(firsts) > 1:
            firsts = heapq.nsmallest(limit, firsts, key=lambda entry: self._rank(entry, now_s))
        return (entry.work for entry in firsts)

    def count_shares(self, bound: Iterable[RoutedRequest]) -> None:
        """Say who has work now: those that wait, and those that are bound."""
        if self._shares is not None:
            self._shares.queued([_view(work) for work in (*self, *bound)])

    def charge(self, work: RoutedRequest) -> None:
        """A request was bound: its tenant is served."""
        if self._shares is not None:
            self._shares.charge(_view(work), self._work_s(work))

    def _ranked(self, work: RoutedRequest) -> _Waiting:
        share = (work.tenant, work.user) if self._shares is not None else None
        # deadlines press as time passes: such a request has an order of its own
        dated = work.request if work.deadline_s < inf else None
        return _Waiting(work, _view(work, self._work_s(work)), (work.kind, share, dated))

    def _rank(self, waiting: _Waiting, now_s: float) -> Rank:
        return rank(waiting.view, now_s, shares=self._shares)


def _view(work: RoutedRequest, work_s: float = 0.0) -> QueuedRequest:
    """A request as the engine's policy sees it."""
    return QueuedRequest(
        request=work.request,
        arrived_s=work.arrived_s,
        left_s=work_s,
        whole_s=work_s,
        deadline_s=work.deadline_s,
        priority=work.priority,
        tenant=work.tenant,
        user=work.user,
    )
