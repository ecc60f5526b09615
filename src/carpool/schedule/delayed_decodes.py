"""Delay a decode by one forward when requests that end with that forward can share it.

A decode is delayed once at most, and only if that costs the waiting decodes less than all other
requests gain: one wide decode takes less than two narrow ones.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import inf

from carpool.schedule.cost import Costs
from carpool.schedule.views import ParkedCall


@dataclass(slots=True)
class DelayedDecodes:
    """Decides whether decodes wait, and remembers which have."""

    costs: Costs
    _held: set[int] = field(default_factory=set)  # by order of the parked call

    def wait(
        self, decodes: Sequence[ParkedCall], denoise: Sequence[ParkedCall], parked: int
    ) -> bool:
        """Whether decodes that could run now wait.

        Args:
            decodes: that would share a forward.
            denoise: calls of the forward that runs if they wait.
            parked: how many calls there are in all.
        """
        first, orders = decodes[0], {call.order for call in decodes}
        has_deadline = min([call.deadline_s for call in decodes]) < inf
        if has_deadline or not self._held.isdisjoint(orders):
            return False
        one_s = self.costs.usual_s(denoise[0].kind, denoise[0].rows)
        alone_s = self.costs.usual_s(first.kind, first.rows)
        ending = sum(call.left_s < alone_s + 1.5 * one_s for call in denoise)
        now, more = sum(call.rows for call in decodes), ending * first.rows
        curve = self.costs.curve(first.kind)
        if not ending or now + more > first.max_rows or not curve.may_try(now + more, more):
            return False
        step_s = self._turn_s(denoise[0], sum(call.rows for call in denoise), len(denoise))
        now_s, later_s = (self._turn_s(first, n, len(decodes)) for n in (now, more))
        both_s = self._turn_s(first, now + more, len(decodes) + ending)
        costs_s = len(decodes) * (step_s + both_s - now_s)
        if costs_s >= (parked - len(decodes)) * (now_s + later_s - both_s):
            return False
        self._held |= orders
        return True

    def ran(self, parked: Sequence[ParkedCall], chosen: Set[int]) -> None:
        """Forget those that ran, by their orders, or were cancelled."""
        if self._held:
            self._held &= {call.order for call in parked} - chosen

    def _turn_s(self, call: ParkedCall, rows: int, calls: int) -> float:
        """Seconds of a forward and of what the loop and the pipelines' own code take beside it."""
        return self.costs.turn_s(call.kind, calls, self.costs.usual_s(call.kind, rows))
