"""The `continuous` mode: calls of all requests share forwards, as wide as is worth it.

Each forward takes two decisions: which call leads it, and how many others of its key run with it.

*Order.* Requests are ranked by predicted remaining work plus `AGEING` times their arrival time, so
shorter ones go first unless a longer one came long before. Between keys, whose calls cannot share a
forward, the key with the highest predicted completion rate runs. Requests that started together
(the cohort) keep sharing forwards until all have ended, unless a much shorter one, or one of higher
priority that is not much longer, arrives; while another key waits, only requests that make its
forwards little slower may join. A request whose deadline presses goes before all others, the one
with the least slack first.

*Encodes and decodes* run between denoising forwards: one of each, or as many as take no longer than
the forward itself; all of them where sizes take turns and a cohort has just ended, so that the next
one begins with every request that is there. A request that would not share the next forward is
encoded later, with others. A call that many forwards of later requests have passed leads next
(`starvation.py`).

*Shares.* With `fair_share` the tenant that was served least for its weight leads
(`fair_shares.py`); all of the above orders the requests of one tenant, and of tenants that are
even.

The width of a forward is chosen in `widths.py`.

Sources: iteration-level scheduling, Yu et al., Orca, OSDI 2022; ageing, Silberschatz, Operating
System Concepts, 2018.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from carpool.schedule.arrivals import LoadEstimate
from carpool.schedule.cost import Costs
from carpool.schedule.delayed_decodes import DelayedDecodes
from carpool.schedule.fair_shares import FairShares
from carpool.schedule.starvation import StarvationGuard
from carpool.schedule.views import Admission, Choice, ParkedCall, QueuedRequest
from carpool.schedule.widths import Widths

AGEING = 3.0  # seconds of work that a second of waiting is worth
GROUP_AGEING = 0.45  # the same, between requests that cannot share a forward
JOINING = 0.2  # of its own time: what a row may add to a forward that others wait for
SHORTER = 0.5  # who has less than this part of others' work left may interrupt them
FAVOURED = 2.0  # the same for who has a higher priority
PRESSING = 2.0  # times the work left: a deadline nearer than this presses, if it can be met
PRIORITY = 4.0  # requests' work that one step of priority is worth


@dataclass(slots=True)
class Continuous:
    """The policy, with the little it remembers between forwards."""

    costs: Costs
    max_running: int = 32
    min_gain: float = 0.05
    fair_share: Mapping[str, float] | None = None  # weights of tenants; None: not fair
    _starvation: StarvationGuard = field(init=False)
    # on encoding and decoding, each, since the last denoising forward
    _spent_s: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "decode": 0.0})
    _load: LoadEstimate = field(default_factory=LoadEstimate)
    _cohort: set[int] = field(default_factory=set)  # requests that go on together
    _ranks: dict[int, tuple[float, ...]] = field(default_factory=dict)  # by order
    _shares: FairShares | None = field(init=False)
    _widths: Widths = field(init=False)
    _trials: dict[tuple[int, int], float] = field(default_factory=dict)  # by leader and calls
    _decodes: DelayedDecodes = field(init=False)

    def __post_init__(self) -> None:
        self._shares = None if self.fair_share is None else FairShares(self.fair_share)
        self._starvation = StarvationGuard(is_fair=self._shares is not None)
        self._widths, self._decodes = Widths(self.costs, self.min_gain), DelayedDecodes(self.costs)

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        """Choose the requests to admit: as many as there are places for, by their ranks."""
        self._load.came(waiting, running, now_s)
        if self._shares is not None:
            self._shares.queued(waiting)
        free = self.max_running - running
        if free <= 0 or not waiting:
            return Admission(())
        if any(one.priority or one.deadline_s < inf for one in waiting) or self._shares is not None:
            rank = {one.request: self._rank(one, now_s) for one in waiting}
            waiting = sorted(waiting, key=lambda one: rank[one.request])
        if self._shares is not None:
            self._shares.admitted(waiting[:free])
        return Admission(tuple(one.request for one in waiting[:free]))

    def choose(self, parked: Sequence[ParkedCall], waiting_s: float, now_s: float) -> Choice:
        """Choose the calls of the next forward.

        Args:
            parked: calls waiting, in any order; no two with the same `order`.
            waiting_s: predicted work of requests that are not admitted yet.
            now_s: on the clock of `arrived_s` and `deadline_s`.
        """
        return self.choose_among(parked, parked, waiting_s, now_s)

    def choose_among(
        self,
        parked: Sequence[ParkedCall],
        everyone: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
    ) -> Choice:
        """Choose as if these calls alone were parked, but forget none of the others.

        Args:
            everyone: all that are parked: also those that the sweep has taken, or leaves.
        """
        if self._shares is not None:
            self._shares.running(everyone)
        if not parked:
            return Choice(())
        self._trials.clear()
        is_alone = (
            len(parked) == 1 and not self._starvation.forwards and parked[0].deadline_s == inf
        )
        if is_alone and self._shares is None:  # nothing to choose
            if parked[0].phase == "denoise" and parked[0].request not in self._cohort:
                self._cohort = set()
            choice = Choice(tuple(parked), why="nobody")
            self._note(choice, parked, everyone, now_s)
            return choice
        phases: dict[str, list[ParkedCall]] = {"decode": [], "encode": [], "denoise": []}
        for call in parked:
            phases[call.phase].append(call)
        if denoise := phases["denoise"]:
            may_wait = self._load.is_mixed and not any(c.request in self._cohort for c in denoise)
            groups = self._grouped(denoise, now_s)
            candidates = self._candidates(groups, now_s)
            others = [group for key, group in groups.items() if key != candidates[0].key]
            choice = self._fill(candidates, parked, waiting_s, now_s, others)

            def would_share(newcomer: ParkedCall) -> bool:
                longer = self._with_newcomer(newcomer, candidates[0], groups)
                width, _ = self._width(longer, parked, waiting_s, now_s, others)
                return any(call.order == newcomer.order for call in longer[:width])

            for sides in (self._due(phases[one], candidates[:1]) for one in ("decode", "encode")):
                if not sides:
                    continue
                beside = self._beside(sides, parked, waiting_s, now_s)
                if may_wait or self._is_their_turn(beside, choice, parked, now_s, would_share):
                    choice = beside
                    break
        else:
            decode, encode = (self._due(phases[one], parked) for one in ("decode", "encode"))
            choice = self._beside(decode or encode, parked, waiting_s, now_s)
        self._note(choice, parked, everyone, now_s)
        return choice

    def _due(
        self, sides: Sequence[ParkedCall], others: Sequence[ParkedCall]
    ) -> Sequence[ParkedCall]:
        """With fair shares, the calls of tenants that were served no more than the others' least.

        Else whoever has much to encode or decode would get more than its share.
        """
        if self._shares is None:
            return sides
        least_s = min(self._shares.rank(call)[0] for call in others)
        return [call for call in sides if self._shares.rank(call)[0] <= least_s]

    def _beside(
        self,
        sides: Sequence[ParkedCall],
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
    ) -> Choice:
        first = min(sides, key=lambda call: call.order)
        others = [call for call in sides if call.key == first.key and call is not first]
        others.sort(key=lambda call: self._rank(call, now_s))
        return self._fill([first, *others], parked, waiting_s, now_s)

    def _is_their_turn(
        self,
        beside: Choice,
        denoise: Choice,
        parked: Sequence[ParkedCall],
        now_s: float,
        would_share: Callable[[ParkedCall], bool],
    ) -> bool:
        """Whether a decode or encode runs before the next denoising forward.

        An encode whose request would not share it waits: the requests in it end sooner, and others
        may be encoded with it.
        """
        first, leader = beside.calls[0], denoise.calls[0]
        may_wait = first.phase == "decode" and self._shares is None
        if may_wait and self._decodes.wait(beside.calls, denoise.calls, len(parked)):
            return False
        rows = sum(call.rows for call in denoise.calls)
        if first.phase == "encode" and not (denoise.why == "nobody" and would_share(first)):
            is_first = self._rank(first, now_s) < self._rank(leader, now_s)
            if not (is_first or self._starvation.is_late(first)):
                return False
        spent_s = self._spent_s[first.phase]
        if not spent_s:
            return True
        one_s = self.costs.usual_s(leader.kind, rows)
        rows = sum(call.rows for call in beside.calls)
        return spent_s + self.costs.usual_s(first.kind, rows) <= one_s

    def _grouped(
        self, calls: Sequence[ParkedCall], now_s: float
    ) -> dict[Hashable, list[ParkedCall]]:
        """Calls by key, in the order of their ranks, as are the groups by their firsts.

        Ranks stay what they are while nobody has a deadline or a share.
        """
        old = self._ranks
        if self._shares is not None or min([call.deadline_s for call in calls]) < inf:
            old = {}
        ranks = {call.order: old.get(call.order) or self._rank(call, now_s) for call in calls}
        self._ranks = ranks
        groups: dict[Hashable, list[ParkedCall]] = {}
        for call in sorted(calls, key=lambda call: ranks[call.order]):
            groups.setdefault(call.key, []).append(call)
        return groups

    def _candidates(
        self, groups: Mapping[Hashable, list[ParkedCall]], now_s: float
    ) -> list[ParkedCall]:
        """The leader and all that may run with it, in the order in which they are taken."""
        first = next(iter(groups.values()))[0]
        if late := self._starvation.late(call for group in groups.values() for call in group):
            leader = min(late, key=lambda call: call.order)
        else:
            presses = self._ranks[first.order][1] < inf
            for group in groups.values():
                begun = [call for call in group if call.request in self._cohort]
                if begun and not presses and not _may_interrupt(first, begun[0]):
                    return self._joined(begun, group, is_alone=len(groups) == 1)
            leader = first if presses or len(groups) == 1 else self._cheapest(groups, now_s)
        self._cohort = set()
        return [leader, *(call for call in groups[leader.key] if call is not leader)]

    def _with_newcomer(
        self,
        newcomer: ParkedCall,
        leader: ParkedCall,
        groups: Mapping[Hashable, list[ParkedCall]],
    ) -> list[ParkedCall]:
        """The leader's candidates as if a request that is encoded first were there already.

        Nobody knows the key of calls to come: they are taken for ones like the leader's.
        """
        key, rows, most = leader.key, leader.rows, leader.max_rows
        call = replace(newcomer, key=key, rows=rows, max_rows=most, kind=leader.kind)
        group = [*groups[key], call]
        begun = [call for call in group if call.request in self._cohort]
        return self._joined(begun, group, is_alone=len(groups) == 1) if begun else group

    def _joined(
        self, begun: list[ParkedCall], group: Sequence[ParkedCall], *, is_alone: bool
    ) -> list[ParkedCall]:
        """The calls of a group that are under way, and those that may join them.

        While others wait whose calls cannot share it, only those who make it little slower.
        """
        more = [call for call in group if call.request not in self._cohort]
        if is_alone:
            return begun + more
        joined = list(begun)
        curve, rows = self.costs.curve(begun[0].kind), sum(call.rows for call in begun)
        for call in more:
            slower_s = curve.seconds(rows + call.rows) - curve.seconds(rows)
            if slower_s > JOINING * curve.seconds(call.rows) or rows > call.max_rows:
                break
            joined.append(call)
            rows += call.rows
        return joined

    def _cheapest(self, groups: Mapping[Hashable, list[ParkedCall]], now_s: float) -> ParkedCall:
        """The first of the key whose requests end at the highest rate, if all ran now."""

        def price(group: Sequence[ParkedCall]) -> tuple[float, ...]:
            curve = self.costs.curve(group[0].kind)
            most = min(len(group), max(1, group[0].max_rows // group[0].rows))
            sharing = group[:most]
            alone_s = curve.seconds(group[0].rows)
            gain = most * alone_s / curve.seconds(sum(call.rows for call in sharing))
            mean_s = sum(call.left_s for call in sharing) / most
            one = replace(group[0], left_s=mean_s / gain)
            return self._rank(one, now_s, GROUP_AGEING)

        return min(groups.values(), key=price)[0]

    def _rank(
        self, one: ParkedCall | QueuedRequest, now_s: float, ageing: float = AGEING
    ) -> tuple[float, ...]:
        """Order of requests: short ones first; ties by arrival, never by chance."""
        pressing, share = inf, (0.0, 0.0)
        if one.deadline_s < inf:
            left_s = one.left_s * self.costs.slower
            slack_s = one.deadline_s - now_s - left_s
            # who is late already gains nothing by being first
            pressing = slack_s if 0 <= slack_s < PRESSING * left_s else inf
        if self._shares is not None:
            share = self._shares.rank(one)
        favour = one.priority * PRIORITY * one.whole_s
        work = one.left_s + ageing * one.arrived_s - favour
        return (share[0], pressing, share[1], work, one.request)

    def _fill(
        self,
        candidates: Sequence[ParkedCall],
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        others: Sequence[Sequence[ParkedCall]] = (),
    ) -> Choice:
        """Choose which candidates run with the leader, and say why no more do."""
        if len(candidates) == 1:
            return Choice((candidates[0],), why="nobody")
        width, why = self._width(candidates, parked, waiting_s, now_s, others)
        if self._widths.loss_s is not None:
            self._trials[candidates[0].order, width] = self._widths.loss_s
        return Choice(tuple(candidates[:width]), why)

    def _width(
        self,
        candidates: Sequence[ParkedCall],
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        others: Sequence[Sequence[ParkedCall]],
    ) -> tuple[int, str]:
        """How many candidates share the forward.

        Args:
            others: groups of other keys, which wait for their turns.
        """
        mean_s = sum([call.left_s for call in candidates]) / len(candidates)
        all_s = sum([call.left_s for call in parked]) + waiting_s
        present = all_s / mean_s if mean_s else float(len(parked))
        between = sum(map(self._round_s, others)) / mean_s if mean_s else 0.0
        backlog = self._load.backlog(present, now_s, self.costs.stretch)
        waited_s = now_s - sum([call.arrived_s for call in candidates]) / len(candidates)
        waited = max(0.0, waited_s / mean_s) if mean_s else 0.0
        return self._widths.choose(candidates, backlog, between, waited, present)

    def _round_s(self, group: Sequence[ParkedCall]) -> float:
        """How long as many of a group as may share a forward take for the work they have left."""
        one, curve = group[0], self.costs.curve(group[0].kind)
        rows = min(len(group) * one.rows, max(one.max_rows, one.rows))
        mean_s = sum([call.left_s for call in group]) / len(group)
        return mean_s * curve.seconds(rows) / curve.seconds(one.rows)

    def _note(
        self,
        choice: Choice,
        parked: Sequence[ParkedCall],
        everyone: Sequence[ParkedCall],
        now_s: float,
    ) -> None:
        leader = choice.calls[0]
        loss_s = self._trials.get((leader.order, len(choice.calls)))
        if loss_s is not None:
            self.costs.trials.ran(loss_s)
        is_denoise = leader.phase == "denoise"
        depth = sum([c.key == leader.key for c in parked])
        # one more waits if any is to be encoded, which happens once it would share; if all of them
        # counted, wide forwards were tried where next to none runs
        depth += is_denoise and any(c.phase == "encode" for c in parked)
        self._widths.ran(leader.kind, depth, is_trial=loss_s is not None)
        if is_denoise:
            self._load.ran(choice.calls, self.costs.curve(leader.kind), now_s)
        self._starvation.ran(choice.calls, parked, everyone)
        self._decodes.ran(everyone, {call.order for call in choice.calls})
        if is_denoise and not self._cohort:
            self._cohort = {call.request for call in choice.calls}
        seconds = self.costs.usual_s(leader.kind, sum(call.rows for call in choice.calls))
        if is_denoise:
            self._spent_s = dict.fromkeys(self._spent_s, 0.0)
        else:
            self._spent_s[leader.phase] += seconds
        if self._shares is not None:
            # a copy of streamed weights is for all that share the sweep, and charged to nobody
            seconds = self.costs.compute_s(leader.kind, sum(call.rows for call in choice.calls))
            for call in choice.calls:
                self._shares.charge(call, seconds / len(choice.calls))


def _may_interrupt(one: ParkedCall, begun: ParkedCall) -> bool:
    part = FAVOURED if one.priority > begun.priority else SHORTER
    return one.left_s < part * begun.left_s
