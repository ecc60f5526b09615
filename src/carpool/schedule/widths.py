"""How many calls of one key share a forward in `continuous`, by what forwards of each width take.

*The mean of rounds.* With n requests' worth of work in the engine, of which w share a forward in
t(w) seconds a step, the work is done in rounds of w, and the mean request is done after (n + w) / 2
of them times t(w) / w. The width with the least mean is taken: w = 1 when rows gain nothing and few
wait, the widest that gains anything when many wait. n counts the present requests and those that
are likely to come before the engine is empty, by the arrivals so far. Where other keys wait, one of
their rounds may follow, and a call that is left out waits for it as well; so there, rows that gain
next to nothing need a longer queue to be worth it.

*Throughput.* Fewer, wider forwards leave the device sooner. A wider forward that the present
requests can fill is taken where the mean latency, from arrival to end, loses no more than a part of
the gain in requests a second, and no other key waits. Requests that came at once have a rule of
their own (`burst.py`).

*Uncertainty.* While few wait, a wider forward is assumed to be slower by a part of its standard
deviation: the best of many guesses is too good to be true. Where many wait, near ties go to the
wider: a wrong choice of the narrower costs throughput, and near capacity everybody's latency, a
wrong choice of the wider only a part of one round. A width that may well be better than the best is
tried now and then (`trials.py`), never twice in a row: the forward between two trials tells how
fast the machine was.

The mean of rounds is our own: ARCHITECTURE.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from carpool.schedule.burst import (
    LEAST_CALLS,
    MOST_CALLS,
    are_equal,
    best_width,
    best_width_of_mixed,
    came_at_once,
    trial_s,
)
from carpool.schedule.cost import AnyCurve, Costs, Curve
from carpool.schedule.trials import FLOOR, QueueDepths, price, value
from carpool.schedule.views import CallKind, ParkedCall

DOUBT = 0.5  # standard deviations by which a wider forward is taken for slower, if few wait
NEAR = 0.05  # of the mean of rounds: what the wider may be worse by where many wait, if learned
TRADE = 0.25  # of the requests a second that a wider forward gains: what the mean may lose for it
MOST_TRADED = 0.05  # of the mean latency
LEAST_GAINED = 0.1  # of the requests a second: less is not worth that
CLOSED = 1.1  # times the present requests: a backlog of no more than this is not filled up
LONG_QUEUE = 20  # requests: with so many, rows that gain less than `min_gain` are worth it, too
MIXED_QUEUE = (
    4.0  # requests: where many wait beside others, n times as many need an nth of the gain
)
BETWEEN = 0.1  # of the rounds of other keys: most come after the calls left out of this one


@dataclass(slots=True)
class Widths:
    """The choice of a width, with what the last one was."""

    costs: Costs
    min_gain: float
    loss_s: float | None = None  # that the width chosen last may lose, if it is a trial
    has_tried: bool = False  # in the last forward
    _depths: dict[CallKind, QueueDepths] = field(default_factory=dict)
    _burst_s: float = -inf  # when the last burst came
    _burst_calls: int = 0  # of it
    _is_mixed: bool = False  # its requests differ

    def choose(
        self,
        candidates: Sequence[ParkedCall],
        backlog: float,
        between: float = 0.0,
        waited: float = 0.0,
        present: float | None = None,
    ) -> tuple[int, str]:
        """How many of the candidates, calls of one key, run together, and what stops the next.

        Args:
            candidates: calls in the order in which they are taken.
            backlog: work in the engine, in requests like these.
            between: rounds of all other keys that wait, one each, in rounds of one of these.
            waited: mean time since arrival, in multiples of the work that is left, alone.
            present: the part of the backlog that is here already; None: all of it.
        """
        kind, most = candidates[0].kind, candidates[0].max_rows
        curve = self.costs.curve(kind)
        seconds_of, sd_of = curve.seconds, curve.sd
        between_s = BETWEEN * between * curve.seconds(candidates[0].rows)
        is_long, min_gain = backlog >= LONG_QUEUE, self.min_gain
        if is_long:
            min_gain *= MIXED_QUEUE / backlog
        many_wait = (backlog if present is None else present) >= LONG_QUEUE
        best, least_s, rate, paying_rows, rows = 1, inf, 0.0, 0, 0
        why, tie = "nobody", 0.0 if isinstance(curve, Curve) else NEAR
        loop_s = self.costs.beside_s(kind, 0)
        own_s, runs_ahead = self.costs.beside_s(kind, 1) - loop_s, self.costs.runs_ahead
        means: list[tuple[int, int, float, float]] = []  # calls, rows, mean of rounds, rounds
        for n, call in enumerate(candidates, 1):
            rows += call.rows
            if n > 1 and rows > most:
                why = "cap"
                break
            if n > 1 and not curve.may_try(rows, call.rows):
                why = "untried"
                break
            forward_s, beside_s = seconds_of(rows), loop_s + n * own_s
            longer_s = forward_s if forward_s > beside_s else beside_s
            seconds, near = longer_s if runs_ahead else forward_s + beside_s, 1.0
            rounds = ((backlog if backlog > n else n) + n) / n
            mean_s = (seconds + between_s) * rounds
            means.append((n, rows, mean_s, rounds))
            if n > 1:
                sd = sd_of(rows)
                if many_wait:
                    near += tie
                else:
                    mean_s += DOUBT * sd * rounds
                if between or not is_long:  # rows that bring little are not worth it
                    perhaps_s = 0.0 if is_long else DOUBT * sd
                    gain = n / (seconds + perhaps_s) / rate - 1
                    if gain <= min_gain * (rows - paying_rows):
                        continue
            rate, paying_rows = n / seconds, rows
            if mean_s < least_s * near:  # of the least: ties do not add up
                best, least_s = n, min(mean_s, least_s)
        trial, self.loss_s = best, None
        if len(means) > 1:
            round_s = means[best - 1][2] / means[best - 1][3]
            here = round(backlog if present is None else present)
            is_closed = present is not None and backlog < CLOSED * present
            best_of = None if between else self._burst(candidates, round_s, here, is_closed, waited)
            if best_of is not None:
                best, trial = self._of_burst(curve, means, best_of)
            else:
                if not between and best < len(means):  # else others would wait for it
                    waited_s = (
                        2 * waited * seconds_of(candidates[0].rows)
                    )  # rounds are twice the mean
                    best = _wider(curve, means, best, backlog, waited_s)
                depths = self._depths.get(kind) or QueueDepths()
                trial = self._trial(curve, depths, means, best, here, NEAR if many_wait else 0.0)
        if trial != best:
            return trial, "knee"
        if best < n and why == "nobody":
            why = "knee"
        return best, why

    def ran(self, kind: CallKind, depth: int, *, is_trial: bool) -> None:
        """Note a forward that begins, and how many calls waited that could have been in it."""
        self.has_tried = is_trial
        if kind not in self._depths:
            self._depths[kind] = QueueDepths()
        self._depths[kind].ran(depth)

    def _burst(
        self,
        candidates: Sequence[ParkedCall],
        round_s: float,
        here: int,
        is_closed: bool,
        waited: float,
    ) -> Callable[[Sequence[float]], int] | None:
        """A function from seconds of turns to the best width of a burst; None: it is no burst.

        Args:
            here: requests, by now.
            is_closed: next to nobody is likely to come before they are done.
            waited: as of `choose`.
        """
        if not came_at_once(candidates, round_s):
            return None
        arrived_s, is_equal = candidates[0].arrived_s, are_equal(candidates)
        if abs(arrived_s - self._burst_s) > round_s:
            if len(candidates) < LEAST_CALLS or not (is_equal or is_closed):
                return None
            self._burst_s, self._burst_calls, self._is_mixed = arrived_s, here, False
        self._burst_calls = max(self._burst_calls, len(candidates))
        self._is_mixed |= not is_equal
        # nobody knows the steps of calls that are encoded first: all of them look equal
        if is_equal and not (self._is_mixed and candidates[0].phase == "denoise"):
            return lambda seconds: best_width(seconds, self._burst_calls)
        if not is_closed or here > MOST_CALLS:
            return None
        left_s = [call.left_s for call in candidates]
        mean_s = sum(left_s) / len(left_s)
        left_s += [mean_s] * (here - len(left_s))
        return lambda seconds: best_width_of_mixed(seconds, left_s, waited * mean_s)

    def _of_burst(
        self,
        curve: AnyCurve,
        means: Sequence[tuple[int, int, float, float]],
        best_of: Callable[[Sequence[float]], int],
    ) -> tuple[int, int]:
        """The best width of a burst, at worst, and what is run: one that may well be better.

        Only what would change the choice is tried, if it is what is hoped for, and worth it.
        """
        likely = [mean_s / rounds for _, _, mean_s, rounds in means]
        sds = [curve.sd(rows) for _, rows, _, _ in means]
        worst = [seconds + sd for seconds, sd in zip(likely, sds, strict=True)]
        best = best_of(worst)
        if isinstance(curve, Curve) or self.has_tried:
            return best, best
        optimism = curve.optimism
        hoped = [
            max(seconds - optimism * sd, FLOOR * seconds)
            for seconds, sd in zip(likely, sds, strict=True)
        ]
        tried = best_of(hoped)
        if tried == best:
            return best, best
        loss_s = max(trial_s(likely, best, tried), FLOOR * likely[tried - 1])
        each_s = likely[best - 1] / best * tried
        worse, sd = likely[tried - 1] / each_s - 1, sds[tried - 1] / each_s
        is_worth = value(worse, sd, curve.learned) > price(loss_s / each_s, sd, curve.noise)
        if not (is_worth and self.costs.trials.allow(loss_s, in_burst=True)):
            return best, best
        self.loss_s = loss_s
        return best, tried

    def _trial(
        self,
        curve: AnyCurve,
        depths: QueueDepths,
        means: Sequence[tuple[int, int, float, float]],
        best: int,
        here: int,
        tie: float,
    ) -> int:
        """The calls of a width that may well be better than the best, if it may be tried now.

        Args:
            here: requests that wait for the trial: those that are likely to come do not.
            tie: of the mean of rounds: what a narrower one must be better by.
        """
        if isinstance(curve, Curve) or self.has_tried:
            return best
        _, _, best_s, rounds = means[best - 1]
        best_round_s, chosen, most, loss_s = best_s / rounds, best, 0.0, 0.0
        for n, rows, mean_s, rounds in means:
            sd, worse = curve.sd(rows) * rounds / best_s, mean_s / best_s - 1
            if n < best:
                worse += tie
            gained = value(worse, sd, curve.learned * depths.share(n))
            if n == best or gained <= most:
                continue
            own = (max(here, n) + n) / n  # rounds
            others = (max(here, best) + best) / best
            lost_s = mean_s / rounds - best_round_s * others / own
            lost_s = max(lost_s, FLOOR * curve.seconds(rows))
            paid = price(lost_s / best_round_s, sd, curve.noise)
            if gained > paid and self.costs.trials.allow(lost_s):
                chosen, most, loss_s = n, gained, lost_s
        if chosen != best:
            self.loss_s = loss_s
        return chosen


def _wider(
    curve: AnyCurve,
    means: Sequence[tuple[int, int, float, float]],
    best: int,
    backlog: float,
    waited_s: float,
) -> int:
    """The widest that gains so much more a second than the best that the mean may lose by it.

    By what it takes at worst, where that is uncertain.
    """
    _, _, best_s, best_rounds = means[best - 1]
    for n, rows, likely_s, rounds in reversed(means[best:]):
        mean_s = likely_s + curve.sd(rows) * rounds
        loss = (mean_s - best_s) / (best_s + waited_s)
        gain = (n * rounds / mean_s) / (best * best_rounds / best_s) - 1
        if n <= backlog and gain >= LEAST_GAINED and loss <= min(MOST_TRADED, TRADE * gain):
            return n
    return best
