"""The `continuous` mode: calls of all requests share forwards, as wide as is worth it.

Two questions at every forward: whose call leads it, and how many others of its key run with it.

*Order.* Requests have ranks: predicted work left, plus `AGEING` times their arrival, so that the
shorter goes first unless the longer came long before. Between keys, whose calls cannot
share a forward, those lead whose requests would end at the highest rate. Who began together goes on
together until all are done, unless somebody much shorter, or of higher priority and not much
longer, comes; while another key waits, only who makes the forwards little slower may join. A
request whose deadline presses goes before all others, the one with the least slack first. Encoding
and decoding go between denoising forwards: one of each, or as many as take no longer than the
forward itself; all of them where sizes take turns and those who began together have ended, so that
the next begin with all that are there. A request that would not share the next forward, once
encoded, is encoded later, with others. A call that many forwards of later requests have passed over
leads next (`passed.py`).

*Shares.* With `fair_share` the tenant that was served least by its weight leads (`shares.py`);
all of the above orders the requests of tenants that are even, and of one tenant.

How wide a forward is, `widths.py` says.

Sources: iteration-level scheduling, Yu et al., Orca, OSDI 2022; ageing, Silberschatz, Operating
System Concepts, 2018.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from carpool.schedule.arrivals import Load
from carpool.schedule.cost import Costs
from carpool.schedule.decodes import Decodes
from carpool.schedule.passed import Passed
from carpool.schedule.shares import Shares
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
    _passed: Passed = field(init=False)
    # on encoding and decoding, each, since the last denoising forward
    _spent_s: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "decode": 0.0})
    _load: Load = field(default_factory=Load)
    _begun: set[int] = field(default_factory=set)  # requests of the group under way
    _ranks: dict[int, tuple[float, ...]] = field(default_factory=dict)  # by order
    _shares: Shares | None = field(init=False)
    _widths: Widths = field(init=False)
    _trials: dict[tuple[int, int], float] = field(default_factory=dict)  # by leader and calls
    _decodes: Decodes = field(init=False)

    def __post_init__(self) -> None:
        self._shares = None if self.fair_share is None else Shares(self.fair_share)
        self._passed = Passed(is_fair=self._shares is not None)
        self._widths, self._decodes = Widths(self.costs, self.min_gain), Decodes(self.costs)

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
        is_alone = len(parked) == 1 and not self._passed.forwards and parked[0].deadline_s == inf
        if is_alone and self._shares is None:  # nothing to choose
            if parked[0].phase == "denoise" and parked[0].request not in self._begun:
                self._begun = set()
            choice = Choice(tuple(parked), why="nobody")
            self._note(choice, parked, everyone, now_s)
            return choice
        phases: dict[str, list[ParkedCall]] = {"decode": [], "encode": [], "denoise": []}
        for call in parked:
            phases[call.phase].append(call)
        if denoise := phases["denoise"]:
            may_wait = self._load.is_mixed and not any(c.request in self._begun for c in denoise)
            groups = self._grouped(denoise, now_s)
            line = self._line(groups, now_s)
            others = [group for key, group in groups.items() if key != line[0].key]
            choice = self._fill(line, parked, waiting_s, now_s, others)

            def would_share(newcomer: ParkedCall) -> bool:
                longer = self._with_newcomer(newcomer, line[0], groups)
                width, _ = self._width(longer, parked, waiting_s, now_s, others)
                return any(call.order == newcomer.order for call in longer[:width])

            for sides in (self._due(phases[one], line[:1]) for one in ("decode", "encode")):
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
        """Those of tenants that were served no more than the others' least, where shares are fair.

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
            if not (is_first or self._passed.is_late(first)):
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

    def _line(self, groups: Mapping[Hashable, list[ParkedCall]], now_s: float) -> list[ParkedCall]:
        """Who leads, and all that may run with it, in the order in which they are taken."""
        first = next(iter(groups.values()))[0]
        if late := self._passed.late(call for group in groups.values() for call in group):
            leader = min(late, key=lambda call: call.order)
        else:
            presses = self._ranks[first.order][1] < inf
            for group in groups.values():
                begun = [call for call in group if call.request in self._begun]
                if begun and not presses and not _may_interrupt(first, begun[0]):
                    return self._joined(begun, group, is_alone=len(groups) == 1)
            leader = first if presses or len(groups) == 1 else self._cheapest(groups, now_s)
        self._begun = set()
        return [leader, *(call for call in groups[leader.key] if call is not leader)]

    def _with_newcomer(
        self,
        newcomer: ParkedCall,
        leader: ParkedCall,
        groups: Mapping[Hashable, list[ParkedCall]],
    ) -> list[ParkedCall]:
        """The leader's line as it would be if somebody who is encoded first were there already.

        Nobody knows the key of calls to come: they are taken for ones like the leader's.
        """
        key, rows, most = leader.key, leader.rows, leader.max_rows
        call = replace(newcomer, key=key, rows=rows, max_rows=most, kind=leader.kind)
        group = [*groups[key], call]
        begun = [call for call in group if call.request in self._begun]
        return self._joined(begun, group, is_alone=len(groups) == 1) if begun else group

    def _joined(
        self, begun: list[ParkedCall], group: Sequence[ParkedCall], *, is_alone: bool
    ) -> list[ParkedCall]:
        """Those of a group that are under way, and who may join them.

        While others wait whose calls cannot share it, only those who make it little slower.
        """
        more = [call for call in group if call.request not in self._begun]
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
        """Who goes first: small ones; ties by place in the line, never by chance."""
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
        line: Sequence[ParkedCall],
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        others: Sequence[Sequence[ParkedCall]] = (),
    ) -> Choice:
        """Choose which of a line run with its leader, and say why nobody more does."""
        if len(line) == 1:
            return Choice((line[0],), why="nobody")
        width, why = self._width(line, parked, waiting_s, now_s, others)
        if self._widths.loss_s is not None:
            self._trials[line[0].order, width] = self._widths.loss_s
        return Choice(tuple(line[:width]), why)

    def _width(
        self,
        line: Sequence[ParkedCall],
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        others: Sequence[Sequence[ParkedCall]],
    ) -> tuple[int, str]:
        """How many of a line share the forward.

        Args:
            others: groups of other keys, which wait for their turns.
        """
        mean_s = sum([call.left_s for call in line]) / len(line)
        all_s = sum([call.left_s for call in parked]) + waiting_s
        present = all_s / mean_s if mean_s else float(len(parked))
        between = sum(map(self._round_s, others)) / mean_s if mean_s else 0.0
        backlog = self._load.backlog(present, now_s, self.costs.stretch)
        waited_s = now_s - sum([call.arrived_s for call in line]) / len(line)
        waited = max(0.0, waited_s / mean_s) if mean_s else 0.0
        return self._widths.choose(line, backlog, between, waited, present)

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
        line = sum([c.key == leader.key for c in parked])
        # one more waits if any is to be encoded, which happens once it would share; if all of them
        # counted, wide forwards were tried where next to none runs
        line += is_denoise and any(c.phase == "encode" for c in parked)
        self._widths.ran(leader.kind, line, is_trial=loss_s is not None)
        if is_denoise:
            self._load.ran(choice.calls, self.costs.curve(leader.kind), now_s)
        self._passed.ran(choice.calls, parked, everyone)
        self._decodes.ran(everyone, {call.order for call in choice.calls})
        if is_denoise and not self._begun:
            self._begun = {call.request for call in choice.calls}
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
