"""Weighted fair shares of the device: among tenants, and among the users of each tenant.

A tenant with queued work gets device time in proportion to its weight, for any number of users:
its users divide its share equally. Every flow has a virtual time, its seconds of service over its
weight, and the lowest goes first. The system's virtual time advances as if all active flows were
served in perfect proportion, and never lags behind all of them. A flow that returns from idle
continues at the system's time: idle time is neither a credit nor a debt, and new flow names
invented for every request do not delay the others.

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

    weights: Mapping[str, float] = field(default_factory=dict)  # `*`: default weight, or 1
    times_s: dict[str, float] = field(default_factory=dict)  # virtual; recent flows only
    active: set[str] = field(default_factory=set)
    system_s: float = 0.0  # virtual; never decreases
    least_s: float = 0.0  # minimum of the active flows
    _weight: float = 1.0  # sum over the active flows

    def activate(self, active: set[str]) -> None:
        """Set the flows with work; newly active flows start at the system's time."""
        stayed_s = [self.times_s[name] for name in active & self.active]
        # no flow stayed: the busy period is over, and all flows served in it are equal
        behind_s = min(stayed_s) if stayed_s else max(self.times_s.values(), default=0.0)
        self.system_s = max(self.system_s, behind_s)
        for name in active - self.active:
            self.times_s[name] = max(self.times_s.get(name, 0.0), self.system_s)
        if len(self.times_s) > len(active):
            ahead = {n: s for n, s in self.times_s.items() if n in active or s > self.system_s}
            self.times_s = ahead
        self.active = active
        self.least_s = min([self.times_s[name] for name in active], default=self.system_s)
        self._weight = fsum(map(self._weight_of, active))  # exact in any order of the set

    def charge(self, name: str, seconds: float) -> None:
        self.times_s[name] += seconds / self._weight_of(name)
        self.system_s += seconds / self._weight

    def time_s(self, name: str) -> float:
        return self.times_s.get(name, self.system_s)

    def _weight_of(self, name: str) -> float:
        return self.weights.get(name, self.weights.get("*", 1.0))


class FairShares:
    """The service received by each tenant, and by each of its users."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start with no service.

        Args:
            weights: by tenant; `*` is the default, 1 if missing.
        """
        self._tenants = _Level(weights)
        self._users: dict[str, _Level] = {}  # keyed by tenant with work
        self._queued: set[tuple[str, str]] = set()
        self._running: set[tuple[str, str]] = set()

    def queued(self, waiting: Iterable[QueuedRequest]) -> None:
        """Set the queued requests. Their tenants have work, too."""
        self._queued = {(request.tenant, request.user) for request in waiting}
        self._activate()

    def admitted(self, waiting: Iterable[QueuedRequest]) -> None:
        """Add admitted requests; they count as running until the next call of `running`."""
        self._running |= {(request.tenant, request.user) for request in waiting}

    def running(self, parked: Iterable[ParkedCall]) -> None:
        """Set the parked calls."""
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
        """The virtual time of the tenant, and the user's lead over its least served user.

        The second is relative: among tenants with equal service, the number of their users does
        not matter.
        """
        users = self._users.get(item.tenant)
        ahead_s = users.time_s(item.user) - users.least_s if users else 0.0
        return self._tenants.time_s(item.tenant), ahead_s

    def charge(self, item: ParkedCall | QueuedRequest, seconds: float) -> None:
        """Charge the device time of a parked call or a request to its tenant and user."""
        self._tenants.charge(item.tenant, seconds)
        self._users[item.tenant].charge(item.user, seconds)
