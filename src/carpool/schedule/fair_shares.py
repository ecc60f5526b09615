"""Weighted fair shares of the device: among tenants, and among the users of each tenant.

A tenant with work in the queue gets device time in proportion to its weight, however many users
it names: these divide what the tenant gets, equally. Every flow has a virtual time, the seconds
that it was served over its weight, and the lowest goes first. The system's virtual time advances
with what all active flows would have in a perfect division, and is never behind all of them. A
flow that comes back from being idle continues there: idle time is neither saved up nor held
against it, and flows that are invented anew for every request do not hold the others back.

Sources: hierarchical packet fair queueing, Bennett and Zhang, SIGCOMM 1996, with its virtual time
(WF2Q+); start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum

from carpool.schedule.views import ParkedCall, QueuedRequest


@dataclass(slots=True)
class _Level:
    """Flows that compete with each other: all tenants, or the users of one tenant."""

    weights: Mapping[str, float] = field(default_factory=dict)  # `*`: of all others, or 1
    times_s: dict[str, float] = field(default_factory=dict)  # virtual; of those that matter still
    active: set[str] = field(default_factory=set)
    system_s: float = 0.0  # virtual; never falls
    least_s: float = 0.0  # of the active flows
    _weight: float = 1.0  # of all active flows

    def activate(self, active: set[str]) -> None:
        """Say which flows have work; those that have only now begin at the system's time."""
        stayed_s = [self.times_s[name] for name in active & self.active]
        # where nobody stayed, a busy period is over: all that were served in it are even
        behind_s = min(stayed_s) if stayed_s else max(self.times_s.values(), default=0.0)
        self.system_s = max(self.system_s, behind_s)
        for name in active - self.active:
            self.times_s[name] = max(self.times_s.get(name, 0.0), self.system_s)
        if len(self.times_s) > len(active):
            ahead = {n: s for n, s in self.times_s.items() if n in active or s > self.system_s}
            self.times_s = ahead
        self.active = active
        self.least_s = min([self.times_s[name] for name in active], default=self.system_s)
        self._weight = fsum(map(self._weight_of, active))  # in whatever order sets have

    def charge(self, name: str, seconds: float) -> None:
        self.times_s[name] += seconds / self._weight_of(name)
        self.system_s += seconds / self._weight

    def time_s(self, name: str) -> float:
        return self.times_s.get(name, self.system_s)

    def _weight_of(self, name: str) -> float:
        return self.weights.get(name, self.weights.get("*", 1.0))


class FairShares:
    """Service that each tenant has received, and each of its users."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Begin with no service.

        Args:
            weights: of tenants; `*` is that of all others, 1 where it is missing.
        """
        self._tenants = _Level(weights)
        self._users: dict[str, _Level] = {}  # of tenants with work
        self._queued: set[tuple[str, str]] = set()
        self._running: set[tuple[str, str]] = set()

    def queued(self, waiting: Iterable[QueuedRequest]) -> None:
        """Note the requests that wait for admission. Their tenants count as having work, too."""
        self._queued = {(request.tenant, request.user) for request in waiting}
        self._activate()

    def admitted(self, waiting: Iterable[QueuedRequest]) -> None:
        """Say who was admitted. Until `running` is next called, they count as running."""
        self._running |= {(request.tenant, request.user) for request in waiting}

    def running(self, parked: Iterable[ParkedCall]) -> None:
        """Say whose calls are parked."""
        self._running = {(call.tenant, call.user) for call in parked}
        self._activate()

    def _activate(self) -> None:
        by_tenant: dict[str, set[str]] = {}
        for tenant, user in self._queued | self._running:
            by_tenant.setdefault(tenant, set()).add(user)
        self._tenants.activate(set(by_tenant))
        self._users = {tenant: self._users.get(tenant) or _Level() for tenant in by_tenant}
        for tenant, users in by_tenant.items():
            self._users[tenant].activate(users)

    def rank(self, item: ParkedCall | QueuedRequest) -> tuple[float, float]:
        """The virtual time of the tenant, and by how much the user is ahead of its least served.

        The second is no absolute time: among tenants that are even, the number of their users
        decides nothing.
        """
        users = self._users.get(item.tenant)
        ahead_s = users.time_s(item.user) - users.least_s if users else 0.0
        return self._tenants.time_s(item.tenant), ahead_s

    def charge(self, item: ParkedCall | QueuedRequest, seconds: float) -> None:
        """Note device time that a parked call, or a request, was served."""
        self._tenants.charge(item.tenant, seconds)
        self._users[item.tenant].charge(item.user, seconds)
