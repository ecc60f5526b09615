"""The machine's present speed, relative to its usual one: one factor for all kinds of calls.

The speed and the curves are learned together (`regression.py`). A single slow run moves them little
(Huber's psi); several surprises of one sign in a row mean a change (a CUSUM test). Then everything
learned since these began is undone, the speed is made uncertain, and the same runs are learned
anew, so that no curve absorbs a change of the machine. If all of them came from one width, that
width itself may have changed: the next runs of others decide (a likelihood ratio test).

Sources: Huber, Annals of Mathematical Statistics 35, 1964; Page, Continuous Inspection Schemes,
Biometrika 41, 1954; likelihood ratios: Wald, Sequential Tests of Statistical Hypotheses, Annals of
Mathematical Statistics 16, 1945.
"""

from dataclasses import dataclass, field
from math import exp, log
from typing import Protocol

from carpool.schedule.regression import CLIP, CurveState, KnownSpeed, surprise, updated

DRIFT = 0.01**2  # variance a device second, of the logarithm
START = 0.05**2  # variance at the beginning
MOST = 0.7**2
RUN = 6.0  # standard deviations, added up over runs of one sign, that mean a change
SLACK = 0.5  # standard deviations of each run that are not counted there
CHANGE = 0.35**2  # variance that a change adds
NOISE = 0.1  # relative standard deviation of a run: at first
NOISES = (0.03, 0.4)  # and its bounds
LEARNED = 0.02  # weight of a run in it, at least
FIRST = 0.15  # and at most: of the first ones
YOUNG = 4  # runs of a width that may be slow, as it allocates, compiles or chooses kernels
COLD = 0.2  # runs that the first of them stands for
REMEMBERED = 64  # runs that are learned anew, at most
DECISIVE = 6.0  # twice the logarithm of a likelihood ratio
CHANGED_SD = 0.15  # of a width that has changed: how well it is known at once


class KindCurve(Protocol):
    """The interface of a curve that the speed is learned from: see `LearnedCurve`."""

    state: CurveState

    def as_of(self, speed: KnownSpeed, now_s: float, rows: int) -> CurveState: ...

    def moved(self, rows: int, by: float, variance: float, speed: KnownSpeed) -> None: ...


@dataclass(slots=True)
class TimedRun:
    """A run, with what was known before it."""

    curve: KindCurve
    rows: int
    seen: float  # logarithm of its seconds
    before: int  # runs of its width
    now_s: float  # device seconds
    state: CurveState
    speed: KnownSpeed
    last_s: float  # device seconds, of the run before


@dataclass(slots=True)
class Suspect:
    """A width that has changed the speed alone."""

    curve: KindCurve
    rows: int
    log: float  # of the speed before
    evidence: float = 0.0  # that the width has changed and not the speed; as `DECISIVE`


@dataclass(slots=True)
class MachineSpeed:
    """The factor, learned from forwards."""

    noise: float = NOISE
    known: KnownSpeed = KnownSpeed(0.0, START)
    _last_s: float = 0.0
    _weight: float = FIRST
    _runs: list[TimedRun] = field(default_factory=list)  # since surprises of one sign began
    _cusum: list[float] = field(default_factory=lambda: [0.0, 0.0])  # upwards, downwards
    _began: list[int] = field(default_factory=lambda: [0, 0])  # places in `_runs`
    _suspect: Suspect | None = None

    @property
    def factor(self) -> float:
        """Seconds just now, as a multiple of the usual ones."""
        return exp(self.known.log)

    @property
    def is_calm(self) -> bool:
        """Whether no change is suspected."""
        return not self._runs

    def learn(self, curve: KindCurve, rows: int, seconds: float, now_s: float, before: int) -> None:
        """Take notice of a run, and let its curve learn from it.

        Args:
            seconds: that it took.
            now_s: device seconds, without its own.
            before: runs of its width, without it.
        """
        seen = log(seconds)
        self._hear(curve, rows, seen)
        run = TimedRun(curve, rows, seen, before, now_s, curve.state, self.known, self._last_s)
        self._runs.append(run)
        z, uncertainty = self._step(run)
        self._watch(0.0 if before < YOUNG and z > CLIP else z)
        if uncertainty < self.noise:  # what the curve does not know is not noise
            least, most = NOISES
            mean = float(curve.state.mean[curve.state.rows.index(rows)])
            left = 1.25 * min(abs(seen - self.known.log - mean), 3 * self.noise)  # of its mean
            self.noise = max(least, min(most, self.noise + self._weight * (left - self.noise)))
            self._weight = max(LEARNED, self._weight * 0.9)

    def _step(self, run: TimedRun) -> tuple[float, float]:
        """Learn from a run: its surprise in standard deviations, and what was not known of it."""
        log_s, variance, kept = self.known
        wider = min(MOST, variance + DRIFT * max(0.0, run.now_s - self._last_s))
        known = KnownSpeed(log_s, wider, kept + log(variance / wider))
        self._last_s = max(self._last_s, run.now_s)
        state = run.curve.as_of(known, run.now_s, run.rows)
        noise = self.noise**2 / (1.0 if run.before else COLD)
        beyond, sd = surprise(state, known, run.rows, run.seen, noise)
        uncertainty = max(0.0, sd * sd - noise - known.variance) ** 0.5
        if run.before < YOUNG and beyond > CLIP * sd:
            noise = beyond * beyond  # it is probably cold
        run.curve.state, self.known = updated(state, known, run.rows, run.seen, noise)
        return beyond / sd, uncertainty

    def _watch(self, surprise: float) -> None:
        """Look for a change: surprises of one sign, one after the other."""
        for way, sign in enumerate((1.0, -1.0)):
            if not self._cusum[way]:
                self._began[way] = len(self._runs) - 1
            self._cusum[way] = max(0.0, self._cusum[way] + min(sign * surprise, CLIP) - SLACK)
        most = max(self._cusum)
        if most > RUN:
            self._again(self._runs[self._began[self._cusum.index(most)] :])
            self._runs, self._cusum = [], [0.0, 0.0]
            return
        begun = [began for began, total in zip(self._began, self._cusum, strict=True) if total]
        gone = max(min(begun, default=len(self._runs)), len(self._runs) - REMEMBERED)
        del self._runs[:gone]
        self._began = [max(0, began - gone) for began in self._began]

    def _again(self, runs: list[TimedRun]) -> None:
        """Learn runs anew, with a speed that may be another since the first of them."""
        first = runs[0]
        for run in reversed(runs):
            run.curve.state = run.state
        log_s, variance, kept = first.speed
        wider = min(MOST, variance + CHANGE)
        self.known = KnownSpeed(log_s, wider, kept + log(variance / wider))
        self._last_s = first.last_s
        if self._suspect is None and len({(id(run.curve), run.rows) for run in runs}) == 1:
            self._suspect = Suspect(first.curve, first.rows, log_s)
        for run in runs:
            self._step(run)

    def _hear(self, curve: KindCurve, rows: int, seen: float) -> None:
        """Hear another width on one that changed the speed: if that has not changed, take it back.

        The other is asked what it should take now, and what at the speed of before.
        """
        suspect = self._suspect
        if suspect is None or (suspect.curve is curve and suspect.rows == rows):
            return
        state = curve.as_of(self.known, self._last_s, rows)
        now, sd = surprise(state, self.known, rows, seen, self.noise**2)
        moved = self.known.log - suspect.log
        now = max(-CLIP * sd - abs(moved), min(CLIP * sd + abs(moved), now))
        suspect.evidence += (now**2 - (now + moved) ** 2) / sd**2
        if abs(suspect.evidence) < DECISIVE:
            return
        self._suspect = None
        if suspect.evidence > 0:
            self.known = self.known._replace(log=suspect.log)
            suspect.curve.moved(suspect.rows, moved, CHANGED_SD**2, self.known)
            self._runs, self._cusum = [], [0.0, 0.0]

    def settle(self, part: float) -> float:
        """Take a part of the difference from the usual speed away; gives it, as a logarithm."""
        moved = part * self.known.log
        self.known = self.known._replace(log=self.known.log - moved)
        if self._suspect is not None:
            self._suspect.log -= moved
        return moved
