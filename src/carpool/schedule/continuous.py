"""The `continuous` mode: calls of all requests share forwards, as wide as pays off.

Each forward takes two decisions: which call leads it, and how many calls of its key join.

*Order.* `rank.py` ranks requests. Calls of different keys cannot share a forward: the key with the
highest predicted completion rate runs. Requests that started together (the cohort) keep sharing
forwards until all have ended, unless a much shorter request arrives, or one of higher priority that
is not much longer. While another key waits, only requests that slow the cohort's forwards a little
may join. A call that many forwards overtook leads next (`starvation.py`).

*Encodes and decodes* run between denoising forwards, for at most the time of the last one, in which
the pipelines' own code counts. The encode of a request that would not share the next forward waits
for others to encode with. A text in progress continues, token by token, between all forwards;
prompts and tokens take turns.

*Shares.* With `fair_share` the tenant with the least service for its weight leads
(`fair_shares.py`); the rules above order the requests of one tenant, and of tenants with equal
service.

*Width.* `width.py` has the rule, `arrivals.py` estimates the load for it.

Source: iteration-level scheduling, Yu et al., Orca, OSDI 2022.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from msgspec.structs import replace

from carpool.schedule.arrivals import LoadEstimate
from carpool.schedule.cost import Costs
from carpool.schedule.fair_shares import FairShares
from carpool.schedule.rank import Rank, is_urgent, rank
from carpool.schedule.starvation import StarvationGuard
from carpool.schedule.views import Admission, Choice, ParkedCall, QueuedRequest
from carpool.schedule.width import best_width

MAX_JOIN_COST = 0.2  # times a call's seconds alone: max delay that joining adds while others wait
TRIAL_EVERY = 32  # forwards per trial at the optimistic width
INTERRUPT_RATIO = 0.5  # times a cohort's remaining work: a shorter request interrupts it


@dataclass(slots=True)
class Continuous:
    """The policy, with its small memory of past forwards."""

    costs: Costs
    max_running: int = 32
    min_gain: float = 0.05
    fair_share: Mapping[str, float] | None = None  # weights of tenants; None: no fair shares
    _starvation: StarvationGuard = field(default_factory=StarvationGuard)
    _load: LoadEstimate = field(default_factory=LoadEstimate)
    _cohort: set[int] = field(default_factory=set)  # requests that started together
    _step: Sequence[ParkedCall] = ()  # the last denoising forward
    _stepped_s: float = inf  # the first decision after it
    _spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # since
    _behind: set[int] = field(default_factory=set)  # of it, while one was measured alone
    _ranks: dict[int, Rank] = field(default_factory=dict)  # keyed by the call's order
    _shares: FairShares | None = field(init=False)
    _forwards: int = 0  # number of forwards so far
    _is_prompts_turn: bool = False  # prompts and tokens of texts take turns

    def __post_init__(self) -> None:
        self._shares = None if self.fair_share is None else FairShares(self.fair_share)

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        """Choose the requests to admit: as many as there are free places, by rank."""
        self._load.arrived(waiting, running, now_s)
        if self._shares is not None:
            self._shares.queued(waiting)
        free = self.max_running - running
        if free <= 0 or not waiting:
            return Admission(())
        if self._shares is not None or any(r.priority or r.deadline_s < inf for r in waiting):
            waiting = sorted(waiting, key=lambda request: self._rank(request, now_s))
        if self._shares is not None:
            self._shares.admitted(waiting[:free])
        return Admission(tuple(request.request for request in waiting[:free]))

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        """Choose the calls of the next forward; see `Policy.choose`."""
        all_parked = parked if all_parked is None else all_parked
        if self._shares is not None:
            self._shares.running(all_parked)
        if not parked:
            return Choice(())
        if len(parked) > 1:
            choice = self._choice(parked, waiting_s, now_s)
        else:
            choice = Choice(tuple(parked), why="nobody")
            if parked[0].phase == "denoise" and parked[0].request not in self._cohort:
                self._cohort = set()
        self._note(choice, parked, all_parked, now_s)
        return choice

    def _choice(self, parked: Sequence[ParkedCall], waiting_s: float, now_s: float) -> Choice:
        phases: dict[str, list[ParkedCall]] = {"decode": [], "encode": [], "denoise": []}
        for call in parked:
            phases[call.phase].append(call)
        work_s = waiting_s + sum([call.left_s for call in parked])
        denoise = None
        if phases["denoise"]:
            candidates = self._candidates(self._grouped(phases["denoise"], now_s), now_s)
            denoise = self._fill(candidates, work_s, now_s)
        side = phases["decode"] + phases["encode"]
        due = self._due(side, denoise.calls[:1] if denoise else parked) if side else ()
        decodes = [call for call in due if call.phase == "decode"]
        tokens = [call for call in due if call.is_token]
        prompts = [call for call in due if call.phase == "encode" and not call.is_token]
        texts = [prompts, tokens] if self._is_prompts_turn else [tokens, prompts]
        for calls in filter(None, (decodes, *texts)):
            first = min(calls, key=lambda call: call.order)
            others = [call for call in due if call.key == first.key and call is not first]
            others.sort(key=lambda call: (call.is_token != first.is_token, self._rank(call, now_s)))
            group = [first, *others]
            choice = (
                self._packed(group, denoise) if first.is_text else self._fill(group, work_s, now_s)
            )
            if denoise is None or self._runs_before(choice, denoise, now_s):
                return choice
        assert denoise is not None  # at least one call is parked
        return denoise

    def _packed(self, calls: Sequence[ParkedCall], denoise: Choice | None) -> Choice:
        """Tokens share forwards of any width; prompts join for the time of the step that waits."""
        first, seconds = calls[0], self.costs.seconds
        most_s = inf if denoise is None else self._turn_s(denoise.calls)
        ends = accumulate([call.rows for call in calls])
        fit = [
            n for call, n in zip(calls, ends, strict=True) if n <= first.max_rows
            and ((first.is_token and call.is_token) or seconds(first.kind, n) <= most_s)
        ]  # fmt: skip
        is_whole = len(fit) == len(calls)
        return Choice(tuple(calls[: max(1, len(fit))]), "nobody" if is_whole else "cap")

    def _due(self, calls: Sequence[ParkedCall], side: Sequence[ParkedCall]) -> Sequence[ParkedCall]:
        """With fair shares, only calls of tenants with no more service than those of `side`."""
        if self._shares is None:
            return calls
        least_s = min(self._shares.rank(call)[0] for call in side)
        return [call for call in calls if self._shares.rank(call)[0] <= least_s]

    def _runs_before(self, side: Choice, denoise: Choice, now_s: float) -> bool:
        """Whether encodes or decodes run before the next denoising forward.

        If that forward has no room for more requests, an encode waits: the requests in the forward
        end sooner, and later arrivals may share the encode. It does not wait before the first step
        of all those requests, and a text in progress does not wait again for each token.
        """
        first, leader = side.calls[0], denoise.calls[0]
        if first.phase == "encode" and not first.is_token:
            if denoise.why == "nobody":
                calls, begun = denoise.calls, {call.request for call in self._step}
                if all(c.left_s >= c.whole_s and c.request not in begun for c in calls):
                    return True  # new requests start together
            elif self._rank(first, now_s) > self._rank(leader, now_s) and not (
                self._starvation.is_late(first)
            ):
                return False
        spent_s, step_s = self._spent_s[first.phase], self._turn_s(self._step or denoise.calls)
        self._stepped_s = min(self._stepped_s, now_s)
        passed_s = max(spent_s, now_s - self._stepped_s)  # the pipelines' own code takes time, too
        return not spent_s or passed_s + self._turn_s(side.calls) <= step_s

    def _grouped(
        self, calls: Sequence[ParkedCall], now_s: float
    ) -> dict[Hashable, list[ParkedCall]]:
        """Calls by key, sorted by rank (cached, without deadlines); groups by their first call."""
        cached = self._ranks
        if self._shares is not None or min([call.deadline_s for call in calls]) < inf:
            cached = {}
        ranks = {call.order: cached.get(call.order) or self._rank(call, now_s) for call in calls}
        self._ranks = ranks
        groups: dict[Hashable, list[ParkedCall]] = {}
        for call in sorted(calls, key=lambda call: ranks[call.order]):
            groups.setdefault(call.key, []).append(call)
        return groups

    def _candidates(
        self, groups: Mapping[Hashable, list[ParkedCall]], now_s: float
    ) -> list[ParkedCall]:
        """The leader, then the calls that may run with it, in order of preference."""
        first = next(iter(groups.values()))[0]
        late = [
            call for group in groups.values() for call in group if self._starvation.is_late(call)
        ]
        if late:
            leader = min(late, key=lambda call: call.order)
        else:
            urgent = is_urgent(self._ranks[first.order])
            for group in groups.values():
                cohort = [call for call in group if call.request in self._cohort]
                if cohort and not urgent and not _may_interrupt(first, cohort[0]):
                    return self._joined(cohort, group, is_alone=len(groups) == 1)
            leader = first if urgent or len(groups) == 1 else self._cheapest(groups, now_s)
        self._cohort = set()
        return [leader, *(call for call in groups[leader.key] if call is not leader)]

    def _joined(
        self, cohort: list[ParkedCall], group: Sequence[ParkedCall], *, is_alone: bool
    ) -> list[ParkedCall]:
        """A group's cohort, and those that may join: if others wait, at little cost to it."""
        newcomers = [call for call in group if call.request not in self._cohort]
        if is_alone:
            return cohort + newcomers
        joined = list(cohort)
        curve, rows = self.costs.curve(cohort[0].kind), sum(call.rows for call in cohort)
        for call in newcomers:
            added_s = curve.seconds(rows + call.rows) - curve.seconds(rows)
            if added_s > MAX_JOIN_COST * curve.seconds(call.rows) or rows > call.max_rows:
                break
            joined.append(call)
            rows += call.rows
        return joined

    def _cheapest(self, groups: Mapping[Hashable, list[ParkedCall]], now_s: float) -> ParkedCall:
        """The first call of the key with the highest predicted completion rate."""

        def price(group: Sequence[ParkedCall]) -> Rank:
            curve, first = self.costs.curve(group[0].kind), group[0]
            sharing = group[: max(1, first.max_rows // first.rows)]
            together_s = curve.seconds(sum(call.rows for call in sharing))
            gain = len(sharing) * curve.seconds(first.rows) / together_s
            mean_s = sum(call.left_s for call in sharing) / len(sharing)
            return self._rank(replace(first, left_s=mean_s / gain), now_s)

        return min(groups.values(), key=price)[0]

    def _rank(self, request: ParkedCall | QueuedRequest, now_s: float) -> Rank:
        return rank(request, now_s, self.costs.slowdown, self._shares)

    def _fill(self, candidates: Sequence[ParkedCall], work_s: float, now_s: float) -> Choice:
        """Choose the candidates that run with the leader, and the reason for the width.

        Args:
            work_s: predicted work of all requests in the engine.
        """
        if len(candidates) == 1:
            return Choice((candidates[0],), why="nobody")
        if behind := [call for call in candidates if call.request in self._behind]:
            return Choice(tuple(behind), why="untried")
        mean_s = sum([call.left_s for call in candidates]) / len(candidates)
        present = work_s / mean_s if mean_s else float(len(candidates))
        backlog = self._load.backlog(present, now_s, self.costs.load_ratio)
        arrivals_s = [call.arrived_s for call in candidates]
        is_burst = backlog <= present and max(arrivals_s) - min(arrivals_s) <= mean_s
        turns, why = list(self._turns(candidates, is_burst)), "knee"
        width = best_width(turns, backlog, self.min_gain, is_burst=is_burst)
        curve, alone = self.costs.curve(candidates[0].kind), candidates[0].rows
        if is_burst and not curve.is_known and curve.is_proven and alone not in curve.measured:
            width = 1  # measure one call alone once, to learn the gain of sharing
        elif is_burst and not curve.has_run(turns[width - 1][0], 1 if width == 1 else 3):
            # requests in step stay in step; so do those that begin, if a run may have been lucky
            in_step = len([call for call in candidates if call.request in self._cohort])
            is_lucky = not in_step and curve.has_run(turns[width - 1][0])
            width = max(width, len(turns) if is_lucky else min(in_step, len(turns)))
        if width == len(candidates):
            why = "nobody"
        elif width == len(turns):
            rows = turns[-1][0] + candidates[width].rows
            why = "cap" if rows > candidates[0].max_rows else "untried"
        return Choice(tuple(candidates[:width]), why)

    def _turns(
        self, candidates: Sequence[ParkedCall], is_burst: bool
    ) -> Iterator[tuple[int, float]]:
        """Rows and seconds of a turn of the first candidate, the first two, and so on.

        The seconds are optimistic in trials, and in a burst for the widest turn until it has run.
        """
        kind, rows = candidates[0].kind, 0
        curve, max_rows = self.costs.curve(kind), candidates[0].max_rows
        is_trial = not is_burst and self._forwards % (1 if curve.is_young else TRIAL_EVERY) == 0
        for calls, call in enumerate(candidates, 1):
            rows += call.rows
            is_wide = rows > max_rows or not (is_burst or curve.may_try(rows, call.rows))
            if calls > 1 and is_wide:
                return
            is_widest = calls == len(candidates) or rows + candidates[calls].rows > max_rows
            is_hope = is_widest and not curve.has_run(rows) if is_burst else is_trial
            forward_s = curve.hoped_s(rows) if is_hope else curve.seconds(rows)
            yield rows, self.costs.turn_s(kind, calls, forward_s)

    def _turn_s(self, calls: Sequence[ParkedCall]) -> float:
        """Seconds of a turn: texts' own code may take longer than their forward."""
        kind, costs = calls[0].kind, self.costs
        forward_s = costs.baseline_s(kind, sum([call.rows for call in calls]))
        return costs.slowdown * costs.turn_s(kind, len(calls), forward_s)

    def _note(
        self,
        choice: Choice,
        parked: Sequence[ParkedCall],
        all_parked: Sequence[ParkedCall],
        now_s: float,
    ) -> None:
        leader, is_fair = choice.calls[0], self._shares is not None
        self._forwards += 1
        if len(all_parked) > 1:
            self._starvation.ran(choice.calls, parked, all_parked, is_fair=is_fair)
        if leader.phase == "denoise":
            curve = self.costs.curve(leader.kind)
            self._load.ran(choice.calls, curve, now_s)
            self._spent_s.clear()
            numbers = {call.request for call in choice.calls}
            self._cohort, self._behind = self._cohort or numbers, self._behind - numbers
            self._step, self._stepped_s = choice.calls, inf
            if 1 == len(numbers) < len(parked) and leader.rows not in curve.measured:
                others = {call.request for call in parked if call.key == leader.key}
                self._behind = self._cohort & others - numbers
        else:
            self._spent_s[leader.phase] += self._turn_s(choice.calls)
            self._is_prompts_turn = leader.is_token
        if self._shares is not None:
            # weight copies serve the whole sweep: no tenant pays for them
            seconds = self.costs.compute_s(leader.kind, sum(call.rows for call in choice.calls))
            for call in choice.calls:
                self._shares.charge(call, seconds / len(choice.calls))


def _may_interrupt(newcomer: ParkedCall, cohort_call: ParkedCall) -> bool:
    part = 1 / INTERRUPT_RATIO if newcomer.priority > cohort_call.priority else INTERRUPT_RATIO
    return newcomer.left_s < part * cohort_call.left_s
