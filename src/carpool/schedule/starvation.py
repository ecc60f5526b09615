"""Starvation guard: a parked call that many forwards of later requests have passed leads next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from carpool.schedule.views import ParkedCall

MAX_PASSED = 64  # forwards of later requests that a parked call lets pass


@dataclass(slots=True)
class StarvationGuard:
    """Counts, for each parked call, the forwards of later requests that passed it; by its order."""

    is_fair: bool = False  # tenants have shares
    forwards: dict[int, int] = field(default_factory=dict)

    def is_late(self, call: ParkedCall) -> bool:
        """Whether so many passed it that it leads next."""
        return self.forwards.get(call.order, 0) >= MAX_PASSED

    def late(self, calls: Iterable[ParkedCall]) -> list[ParkedCall]:
        """The calls that are late."""
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
            parked: the calls that it was chosen from.
            everyone: all parked calls: their counts stay, those of cancelled calls do not.
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

        With fair shares no tenant starves, and one with many parked calls would get more than its
        share if each of them might lead. So only calls of the same user count there.
        """
        if call.phase != "denoise":
            return chosen[0].phase == "denoise" or call.request < chosen[0].request
        if not self.is_fair:
            return call.request < chosen[0].request
        flow = call.tenant, call.user
        return any(call.request < one.request and (one.tenant, one.user) == flow for one in chosen)
