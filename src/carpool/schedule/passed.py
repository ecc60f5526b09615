"""How many forwards of later requests each parked call has let pass: nobody waits for ever."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from carpool.schedule.views import ParkedCall

MAX_PASSED = 64  # forwards of later requests that a parked call lets pass


@dataclass(slots=True)
class Passed:
    """Counts of those who let any pass, by order of the parked call."""

    is_fair: bool = False  # tenants have shares
    forwards: dict[int, int] = field(default_factory=dict)

    def is_late(self, call: ParkedCall) -> bool:
        """Whether it has let so many pass that it leads next."""
        return self.forwards.get(call.order, 0) >= MAX_PASSED

    def late(self, calls: Iterable[ParkedCall]) -> list[ParkedCall]:
        """Those of the calls that are late."""
        if max(self.forwards.values(), default=0) < MAX_PASSED:
            return []
        return [call for call in calls if self.is_late(call)]

    def ran(
        self,
        chosen: Sequence[ParkedCall],
        parked: Sequence[ParkedCall],
        everyone: Sequence[ParkedCall],
    ) -> None:
        """Note a forward.

        Args:
            chosen: its calls, its leader first.
            parked: those that it was chosen from.
            everyone: all that are parked: counts of others stay, of cancelled calls they do not.
        """
        before, orders = self.forwards, {call.order for call in chosen}
        passed = {
            call.order: before.get(call.order, 0) + 1
            for call in parked
            if call.order not in orders and self._counts(call, chosen)
        }
        if before:
            others = [c.order for c in everyone if c.order in before and c.order not in orders]
            passed = {order: before[order] for order in others} | passed
        self.forwards = passed

    def _counts(self, call: ParkedCall, chosen: Sequence[ParkedCall]) -> bool:
        """Whether a forward is one that the call had to let pass.

        Where shares are fair, they see to it that nobody starves: a tenant that has many calls
        parked would get more than its share if it might lead for each of them. But among the calls
        of one user, a late one may lead: the others run with other tenants, and are charged.
        """
        if call.phase != "denoise":
            return chosen[0].phase == "denoise" or call.request < chosen[0].request
        if not self.is_fair:
            return call.request < chosen[0].request
        flow = call.tenant, call.user
        return any(call.request < one.request and (one.tenant, one.user) == flow for one in chosen)
