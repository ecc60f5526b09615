"""Starvation guard: a parked call that many forwards of later requests overtook leads next."""

from collections.abc import Sequence

from carpool.schedule.views import ParkedCall

MAX_OVERTAKEN = 64  # forwards of later requests that may overtake a parked call


class StarvationGuard:
    """Counts the forwards that overtook each parked call."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def is_late(self, call: ParkedCall) -> bool:
        """Whether a call was overtaken so often that it leads next."""
        return self._counts.get(call.order, 0) >= MAX_OVERTAKEN

    def ran(
        self,
        batch: Sequence[ParkedCall],
        candidates: Sequence[ParkedCall],
        parked: Sequence[ParkedCall],
        *,
        is_fair: bool,
    ) -> None:
        """Record a forward chosen from `candidates`; drop the counts of calls not in `parked`."""
        counts = {c.order: self._counts[c.order] for c in parked if c.order in self._counts}
        for call in candidates:
            if _overtakes(batch, call, is_fair=is_fair):
                counts[call.order] = counts.get(call.order, 0) + 1
        for call in batch:
            counts.pop(call.order, None)
        self._counts = counts


def _overtakes(batch: Sequence[ParkedCall], call: ParkedCall, *, is_fair: bool) -> bool:
    """Whether a forward overtook a call. With fair shares, only by calls of the same user."""
    if call.phase != "denoise":
        return batch[0].phase == "denoise" or call.request < batch[0].request
    if not is_fair:
        return call.request < batch[0].request
    flow = call.tenant, call.user
    return any(call.request < c.request and (c.tenant, c.user) == flow for c in batch)
