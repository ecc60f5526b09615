"""The learned curve of one kind of call: seconds by rows, with uncertainty, from noisy forwards.

All widths share one model, learned together with the machine's speed (`regression.py`, `speed.py`).
A width that has not run for long becomes uncertain, and is tried again (`trials.py`). A table from
an earlier run is a prior of little weight; so is the first run of a width in a process, which
allocates, compiles or chooses kernels.

Source: forgetting in time-varying bandits, Bogunovic, Scarlett & Cevher, Time-Varying Gaussian
Process Bandit Optimization, AISTATS 2016.
"""

import threading
from collections.abc import Mapping
from math import exp, log, sqrt

from carpool.schedule.monotone import monotone
from carpool.schedule.regression import (
    CurveState,
    KnownSpeed,
    begin,
    curve,
    drifted,
    from_table,
    with_width,
)
from carpool.schedule.speed import MachineSpeed

FORGOTTEN_S = 500.0  # device seconds in which variances grow by e, at least
FORGOTTEN = 300  # mean runs: where these take longer
PRIOR = 0.6  # runs that an entry of a table stands for
TABLE_SD = 0.1  # of such a run, in a table of `FULL` entries, which contradict a wrong one
FULL = 6  # a shorter table is worth less: nothing tells which of its entries is wrong
MEAN = 0.05  # weight of a run in the mean
REFIT_EVERY = 8  # runs, or an eighth of all; at each while little is known
REFIT_AT_LEAST = 64  # every so many, once much is known
REFIT_PART = 1 / 25  # of `FORGOTTEN_S`: after it, too
EXACT = 1e-3  # relative standard deviation: no width is known better, where two are compared
MOST_OPTIMISM = 2.0  # standard deviations
FASTER = 0.1  # or slower: the logarithm of the machine's speed after which is fitted again
BEYOND = 17  # rows beyond the widest that was run: fitted, too
MOST = 256  # rows that are fitted; wider ones go on in a line


class LearnedCurve:
    """Seconds of a forward by its rows. Begins with nothing, or with a table of an earlier run."""

    def __init__(self, prior: Mapping[int, float] | None = None, weight: float = PRIOR) -> None:
        self.speed = MachineSpeed()  # that of all curves of a model: `Costs` gives it
        self.now_s = 0.0  # device seconds
        self._prior = dict(prior or {})
        logs = {rows: log(seconds) for rows, seconds in self._prior.items()}
        sd = TABLE_SD * max(1.0, FULL / max(1, len(logs)))
        self.state = from_table(logs, sd**2 / weight, 0.0) if logs else begin(0.0)
        self.learned = 0  # runs
        self._runs: dict[int, int] = {}  # by rows
        self._mean_s = 0.0  # of a run, lately
        self._known = max(self._prior, default=0)  # the widest, in rows, run or in the table
        # those who submit ask what forwards take, while the engine's thread learns it
        self._changing = threading.Lock()
        self._is_stale = True
        self._runs_since_fit, self._fits, self._fitted_s, self._fitted_log = 0, 0, 0.0, 0.0
        self._fresh_until_s = 0.0  # device seconds: then the fit is old
        self._seconds: list[float] = []  # by rows less one
        self._sd: list[float] = []
        self._speedups: dict[int, float] = {}  # by the most rows

    def as_of(self, speed: KnownSpeed, now_s: float, rows: int) -> CurveState:
        """The state drifted to now, with this width in it."""
        return with_width(drifted(self.state, speed, now_s, self._forgotten_s), rows)

    def moved(self, rows: int, by: float, variance: float, speed: KnownSpeed) -> None:
        """Take a width for changed, by a logarithm; the speed is what it was before."""
        mean, covariance = self.state.mean.copy(), self.state.covariance.copy()
        place = self.state.rows.index(rows)
        mean[place] += by
        covariance[place, place] += variance
        self.state = self.state._replace(mean=mean, covariance=covariance, speed=speed)
        self._is_stale = True

    @property
    def is_empty(self) -> bool:
        return not (self._runs or self._prior)

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by rows of the widths that were run, and the table's of those that were not."""
        run = {rows: self.seconds(rows) for rows in self._runs}
        return dict(sorted((self._prior | run).items()))

    @property
    def is_proven(self) -> bool:
        """Whether it stands on several runs, or on a table."""
        return bool(self._prior) or any(runs > 2 for runs in self._runs.values())

    @property
    def runs(self) -> dict[int, int]:
        """Runs of this process, by rows; without the first ones."""
        return {rows: runs - 1 for rows, runs in sorted(self._runs.items()) if runs > 1}

    @property
    def is_new(self) -> bool:
        """Whether nothing was run in this process."""
        return not self.learned

    def has_run(self, rows: int) -> bool:
        """Whether a width was run before, in this process."""
        return rows in self._runs

    def shift(self, moved: float) -> None:
        """Give all that is known in other units, where the machine's usual speed is another."""
        with self._changing:
            speed = self.state.speed._replace(log=self.state.speed.log - moved)
            self.state = self.state._replace(mean=self.state.mean + moved, speed=speed)
            self._prior = {rows: seconds * exp(moved) for rows, seconds in self._prior.items()}
            self._is_stale = True

    def learn(self, rows: int, seconds: float) -> None:
        """Take notice of a run, at the time `now_s`; its speed learns, too."""
        with self._changing:
            self._learn(rows, seconds)

    def _learn(self, rows: int, seconds: float) -> None:
        self.learned += 1
        self._mean_s += (seconds - self._mean_s) * (MEAN if self._mean_s else 1.0)
        before = self._runs.get(rows, 0)
        self._runs[rows] = before + 1
        self._known = max(self._known, rows)
        self.speed.learn(self, rows, seconds, self.now_s, before)
        self._runs_since_fit += 1
        is_new = before <= 3 or self._fits < REFIT_EVERY
        is_due = self._runs_since_fit >= max(REFIT_EVERY, min(REFIT_AT_LEAST, self.learned // 8))
        if is_new or is_due or self.now_s - self._fitted_s > REFIT_PART * self._forgotten_s:
            self._is_stale = True

    def seconds(self, rows: int) -> float:
        """How long a forward of so many rows is likely to take, at the machine's usual speed."""
        if self._is_old:
            self._refit()
        values = self._seconds
        return values[rows - 1] if rows <= len(values) else _beyond(rows, values)

    def sd(self, rows: int) -> float:
        """Standard deviation of what `seconds` says: of the curve, not of a single forward."""
        if self._is_old:
            self._refit()
        values = self._sd
        return values[rows - 1] if rows <= len(values) else max(0.0, _beyond(rows, values))

    @property
    def noise(self) -> float:
        """Relative standard deviation of a run."""
        return self.speed.noise

    @property
    def _is_old(self) -> bool:
        faster = abs(self.speed.known.log - self._fitted_log)
        return self._is_stale or self.now_s > self._fresh_until_s or faster > FASTER

    @property
    def optimism(self) -> float:
        """Standard deviations by which a width may be better than it looks, and is worth a trial.

        The more was run, the more improbable chances are taken, as in the paper's experiments.
        """
        return min(MOST_OPTIMISM, sqrt(0.8 * log(4 * max(1, self.learned))))

    def speedup(self, most: int) -> float:
        """How many times as fast calls of one row are done at the best width of at most so many."""
        alone_s = self.seconds(1)  # may fit again
        known = self._speedups.get(most)
        if known is None:
            known = max(n * alone_s / self.seconds(n) for n in range(1, most + 1))
            self._speedups[most] = known
        return known

    def widest(self) -> int:
        """The widest forward that is worth trying: twice the widest that was run."""
        return 2 * max(self._known, 1)

    def may_try(self, rows: int, more: int) -> bool:
        """Whether a forward of so many rows is no wider than is worth trying.

        Args:
            more: of them, those that the last call adds: they are a step, too.
        """
        known = self._known
        return rows <= max(2, 2 * known, known + more if known else 0)

    def _refit(self) -> None:
        """Fit again: enough was learned, or much time has passed."""
        with self._changing:
            state = drifted(self.state, self.speed.known, self.now_s, self._forgotten_s)
            seconds, sd = curve(state, min(MOST, self._known + BEYOND))
            self._sd = sd.tolist()
            self._seconds = monotone(seconds.tolist(), (1 / (sd / seconds + EXACT) ** 2).tolist())
            self._speedups = {}
            self._fitted_s, self._fitted_log = self.now_s, self.speed.known.log
            self._runs_since_fit = 0
            self._fits += 1
            self._fresh_until_s = self.now_s + self._forgotten_s
            self._is_stale = False  # last: until then another thread must not take what is there

    @property
    def _forgotten_s(self) -> float:
        return max(FORGOTTEN_S, FORGOTTEN * self._mean_s)


def _beyond(rows: int, values: list[float]) -> float:
    """Extrapolate, in a line, a list of values that begins with one row."""
    return values[-1] + (rows - len(values)) * (values[-1] - values[-2])
