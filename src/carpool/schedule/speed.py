"""How fast the machine is just now, against its usual speed: one factor for all kinds of calls.

A scalar Kalman filter over the logarithm of seconds seen by seconds expected. How much of a
surprise it takes for itself, and how much it leaves to the curve, goes by how uncertain each of
them is. A single outlier moves it little (Huber's psi); several surprises of one sign in a row
mean that the machine has changed, and make it uncertain and quick (a CUSUM test). If all of them
came from one width, it may as well be that width that has changed: the next run of another one
tells, and then the factor goes back. What ran since a change began was divided by the speed of
before, so the curves forget it: else a line that was worked off in wide forwards, while a busy
phase ended, would make wide forwards look cheap.

Sources: Kalman, Journal of Basic Engineering 82, 1960; Huber, Annals of Mathematical Statistics 35,
1964; Page, Continuous Inspection Schemes, Biometrika 41, 1954.
"""

from dataclasses import dataclass, field
from math import exp, log

from carpool.types import CallKind

DRIFT = 0.02**2  # variance a device second, of the logarithm
START = 0.05**2  # variance at the beginning
MOST = 0.7**2
CLIP = 2.0  # standard deviations of a run: more does not move it more
RUN = 6.0  # standard deviations, added up over runs of one sign, that mean a change
SLACK = 0.5  # standard deviations of each run that are not counted there
CHANGE = 0.35**2  # variance that a change adds
NOISE = 0.1  # relative standard deviation of a run: at first
NOISES = (0.03, 0.4)  # and its bounds
LEARNED = 0.02  # weight of a run in it, at least
FIRST = 0.15  # and at most: of the first ones

FORGOTTEN = 1.002  # a run: how the least uncertainty grows while the best known does not run

Source = tuple[CallKind, int]  # a kind and its rows


@dataclass(slots=True)
class CurveError:
    """What the curve of the source that runs is wrong by, as a logarithm, and how sure that is."""

    source: Source | None = None
    usual_s: float = 1.0
    variance: float = 0.0
    covariance: float = 0.0  # with the speed
    mean: float = 0.0


@dataclass(slots=True)
class MachineSpeed:
    """The factor, learned from forwards."""

    log: float = 0.0  # of seconds just now over the usual ones
    variance: float = START
    noise: float = NOISE
    _cusum: list[float] = field(default_factory=lambda: [0.0, 0.0])  # upwards, downwards
    _sources: list[set[Source]] = field(default_factory=lambda: [set(), set()])  # of these
    _began: list[float] = field(default_factory=lambda: [0.0, 0.0])  # `log`, where these began
    _began_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # device seconds, then
    _suspect: tuple[Source, float] | None = None  # a width that changed the factor; from what
    _error: CurveError = field(default_factory=CurveError)
    _least: float = 1.0  # uncertainty of the source that is known best
    _last_s: float = 0.0
    _weight: float = FIRST
    changed_s: float | None = None  # since when the last run, by now, says the speed was wrong

    @property
    def factor(self) -> float:
        """Seconds just now, as a multiple of the usual ones."""
        return exp(self.log)

    def learn(
        self, source: Source, seconds: float, usual_s: float, uncertainty: float, now_s: float
    ) -> Source | None:
        """Take notice of a run.

        Args:
            source: what ran.
            seconds: that it took.
            usual_s: what the curve says.
            uncertainty: relative standard deviation of that.
            now_s: device seconds, without its own.

        Returns:
            A source whose curve is wrong, as it turns out: it had changed, not the machine.
        """
        self.variance = min(MOST, self.variance + DRIFT * max(0.0, now_s - self._last_s))
        self._last_s = now_s
        self.changed_s = None
        log_ratio = log(seconds / usual_s)
        noise = self.noise**2
        wrong = self._acquitted(source, log_ratio, noise + uncertainty**2)
        error = self._error_of(source, usual_s, uncertainty)
        spread = (noise + self.variance + error.variance + 2 * error.covariance) ** 0.5
        surprise = log_ratio - self.log - error.mean
        self._watch(source, surprise / spread)  # may make the speed uncertain
        own, shared = self.variance + error.covariance, error.variance + error.covariance
        whole = noise + own + shared
        step = max(-CLIP * whole**0.5, min(CLIP * whole**0.5, surprise)) / whole
        self.log += own * step
        error.mean += shared * step
        self.variance -= own * own / whole
        error.variance -= shared * shared / whole
        error.covariance -= own * shared / whole
        if uncertainty < self.noise:  # what the curve does not know is not noise
            least, most = NOISES
            left = abs(log_ratio - self.log - error.mean)
            seen = 1.25 * min(left, 3 * self.noise)  # of a mean deviation
            self.noise = max(least, min(most, self.noise + self._weight * (seen - self.noise)))
            self._weight = max(LEARNED, self._weight * 0.9)
        return wrong

    def _error_of(self, source: Source, usual_s: float, uncertainty: float) -> "CurveError":
        """By how much the curve of a source may be wrong: the same in all of its runs in a row.

        Against the source that is known best: the speed is by definition that of this one.
        """
        self._least = min(uncertainty, self._least * FORGOTTEN)
        variance = max(0.0, uncertainty**2 - self._least**2)
        error = self._error
        if error.source != source:
            error = self._error = CurveError(source, usual_s, variance)
        elif usual_s != error.usual_s:  # the curve has learned from these runs
            error.mean -= log(usual_s / error.usual_s)
            error.usual_s = usual_s
        if variance < error.variance:
            smaller = variance / error.variance
            error.variance = variance
            error.covariance *= smaller**0.5
        return error

    def settle(self, part: float) -> float:
        """Take a part of the difference from the usual speed away; gives it as a factor."""
        moved = part * self.log
        self.log -= moved
        self._began = [log - moved for log in self._began]
        if self._suspect is not None:
            self._suspect = self._suspect[0], self._suspect[1] - moved
        return exp(moved)

    def _watch(self, source: Source, surprise: float) -> None:
        """Look for a change: surprises of one sign, one after the other."""
        for way, sign in enumerate((1.0, -1.0)):
            if not self._cusum[way]:
                self._began[way] = self.log
                self._began_s[way] = self._last_s
                self._sources[way].clear()
            total = self._cusum[way] + min(sign * surprise, CLIP) - SLACK
            self._cusum[way] = max(0.0, total)
            if sign * surprise > SLACK:
                self._sources[way].add(source)
            if total > RUN:
                if len(self._sources[way]) == 1 and self._suspect is None:
                    self._suspect = source, self._began[way]
                self.variance = min(MOST, self.variance + CHANGE)
                self.changed_s = self._began_s[way]
                self._cusum = [0.0, 0.0]

    def _acquitted(self, source: Source, log_ratio: float, run: float) -> Source | None:
        """Whether another width runs as it did before one changed the factor: then go back."""
        if self._suspect is None or self._suspect[0] == source:
            return None
        suspect, before = self._suspect
        self._suspect = None
        if abs(log_ratio - before) > min(CLIP * run**0.5, abs(log_ratio - self.log)):
            return None
        self.log, self._cusum = before, [0.0, 0.0]
        return suspect
