"""The learned curve of one kind of call: seconds by rows, with uncertainty, from noisy forwards.

Each width keeps its last seconds, at the machine's usual speed, and their median; where it runs all
the time, those of blocks of runs, each the median of its runs. A run that is `FORGOTTEN_S` of
device time old (more, where forwards are slow) has a third of its weight left: a width that did not
run for long becomes uncertain, and is tried again (`trials.py`). All widths together make the curve
(`regression.py`). A table from an earlier run is a prior of little weight; so is the first run of a
width in a process, which allocates, compiles or chooses kernels.

Sources: batch means, Law & Kelton, Simulation Modeling and Analysis, 2000, section 9.5; forgetting
in time-varying bandits, Bogunovic, Scarlett & Cevher, Time-Varying Gaussian Process Bandit
Optimization, AISTATS 2016.
"""

import threading
from bisect import insort
from collections import deque
from collections.abc import Mapping
from math import exp, log, sqrt

from carpool.schedule.medians import WidthMedian, monotone, weighted_median

KEPT = 40  # runs, or blocks of runs, of one width
FORGOTTEN_S = 500.0  # device seconds, at least
FORGOTTEN = 300  # mean runs: where these take longer
PRIOR = 0.6  # runs that an entry of a table stands for
APART = 1 / 50  # of `FORGOTTEN_S`: what a block lasts, once `KEPT` runs were kept. So the curve is
# slower than the machine's speed, and a width that runs all the time does not take for its own what
# is a change of the machine.
BLOCK = 25  # runs of a block whose median is kept
COMMON = 0.04  # of a run's variance: what all of a block have in common, the machine's speed then
MEAN = 0.05  # weight of a run in the mean
COLD = 0.2  # runs that the first of a width in a process stands for
NOISE = 0.1  # relative standard deviation of a run, at least: of its seconds at the usual speed
REFIT_EVERY = 8  # runs, or an eighth of all; at each while little is known
REFIT_AT_LEAST = 64  # every so many, once much is known: a fit takes 0.3 ms
REFIT_PART = 1 / 25  # of `FORGOTTEN_S`: after it, too
MOST_OPTIMISM = 2.0  # standard deviations
LEAST_WEIGHT = 1e-4  # of a run, however old
BEYOND = 17  # rows beyond the widest that was run: fitted, too
MOST = 256  # rows that are fitted; wider ones go on in a line


class Block:
    """Runs of one width that came soon one after the other: they count as their median."""

    __slots__ = ("_sorted", "at_s")

    def __init__(self, at_s: float, seconds: float) -> None:
        self.at_s = at_s  # device seconds, of the first
        self._sorted = [seconds]

    @property
    def seconds(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    @property
    def weight(self) -> float:
        """Runs that it stands for: fewer than there were, as they have the speed in common."""
        return 1 / (COMMON + (1 - COMMON) / len(self._sorted))

    def add(self, seconds: float) -> None:
        if len(self._sorted) < BLOCK:
            insort(self._sorted, seconds)

    def rescale(self, factor: float) -> None:
        self._sorted = [seconds * factor for seconds in self._sorted]


class LearnedCurve:
    """Seconds of a forward by its rows. Begins with nothing, or with a table of an earlier run."""

    def __init__(self, prior: Mapping[int, float] | None = None, weight: float = PRIOR) -> None:
        self._prior = {
            rows: WidthMedian(seconds, weight) for rows, seconds in (prior or {}).items()
        }
        self._runs: dict[int, deque[Block]] = {}
        self._first: dict[int, tuple[float, float]] = {}  # the same, of each width's first run
        self._doubted: dict[int, int] = {}  # runs that are kept in any case
        self._noise = NOISE
        self._runs_since_fit, self._fits, self._fitted_s = 0, 0, 0.0
        self._is_stale = True
        # those who submit ask what forwards take, while the engine's thread learns it
        self._changing = threading.Lock()
        self._seconds: list[float] = []  # by rows less one
        self._sd: list[float] = []
        self._speedups: dict[int, float] = {}  # by the most rows
        self._learned = 0  # runs
        self._mean_s = 0.0  # of a run, lately
        self._known = max(self._prior, default=0)  # the widest, in rows, run or in the table
        self._fresh_until_s = 0.0  # device seconds: then the fit is old
        self.now_s = 0.0  # device seconds

    @property
    def is_empty(self) -> bool:
        return not (self._runs or self._first or self._prior)

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by rows of the widths that were run, and the table's of those that were not."""
        table = {rows: point.seconds for rows, point in self._prior.items()}
        return dict(sorted((table | {rows: self.seconds(rows) for rows in self._runs}).items()))

    @property
    def is_proven(self) -> bool:
        """Whether it stands on several runs, or on a table."""
        return bool(self._prior) or any(len(runs) >= 2 for runs in self._runs.values())

    @property
    def runs(self) -> dict[int, int]:
        """Runs of this process that are remembered, by rows; without the first ones."""
        return {rows: len(runs) for rows, runs in sorted(self._runs.items())}

    @property
    def is_new(self) -> bool:
        """Whether nothing was run in this process."""
        return not self._learned

    def has_run(self, rows: int) -> bool:
        """Whether a width was run before, in this process."""
        return rows in self._first

    def doubt(self, rows: int) -> None:
        """Keep the next runs of a width however soon they come: what it takes may have changed."""
        self._doubted[rows] = KEPT

    def forget(self, since_s: float) -> None:
        """Forget runs since then, device seconds: they were divided by a wrong speed."""
        with self._changing:
            for rows, runs in self._runs.items():
                if runs and runs[-1].at_s >= since_s:
                    kept = (block for block in runs if block.at_s < since_s)
                    self._runs[rows] = deque(kept, maxlen=KEPT)
                    self._is_stale = True

    def rescale(self, factor: float) -> None:
        """Give all that is known in other units, where the machine's usual speed is another."""
        with self._changing:
            for rows, prior in self._prior.items():
                self._prior[rows] = WidthMedian(prior.seconds * factor, prior.weight)
            for rows, (seconds, at_s) in self._first.items():
                self._first[rows] = seconds * factor, at_s
            for runs in self._runs.values():
                for block in runs:
                    block.rescale(factor)
            self._mean_s *= factor
            self._is_stale = True

    def learn(self, rows: int, seconds: float, noise: float = NOISE) -> None:
        """Take notice of a run, at the time `now_s`.

        Args:
            seconds: at the machine's usual speed.
            noise: relative standard deviation of a run, as known by now.
        """
        with self._changing:
            self._learn(rows, seconds, noise)

    def _learn(self, rows: int, seconds: float, noise: float) -> None:
        self._noise = max(NOISE, noise)  # what the machine's speed was then is not known exactly
        self._learned += 1
        self._mean_s += (seconds - self._mean_s) * (MEAN if self._mean_s else 1.0)
        if rows not in self._first:
            self._first[rows] = seconds, self.now_s
            self._known = max(self._known, rows)
            self._is_stale = True
            return
        runs = self._runs.setdefault(rows, deque(maxlen=KEPT))
        doubted = self._doubted.get(rows, 0)
        self._doubted[rows] = max(0, doubted - 1)
        if doubted or len(runs) < KEPT or self.now_s - runs[-1].at_s >= APART * self._forgotten_s:
            runs.append(Block(self.now_s, seconds))
        else:
            runs[-1].add(seconds)
        self._runs_since_fit += 1
        is_new = len(runs) <= 3 or self._fits < REFIT_EVERY
        is_due = self._runs_since_fit >= max(REFIT_EVERY, min(REFIT_AT_LEAST, self._learned // 8))
        if is_new or is_due or self.now_s - self._fitted_s > REFIT_PART * self._forgotten_s:
            self._is_stale = True

    def seconds(self, rows: int) -> float:
        """How long a forward of so many rows is likely to take, at the machine's usual speed."""
        if self._is_stale or self.now_s > self._fresh_until_s:
            self._refit()
        values = self._seconds
        return values[rows - 1] if rows <= len(values) else _beyond(rows, values)

    def sd(self, rows: int) -> float:
        """Standard deviation of what `seconds` says: of the curve, not of a single forward."""
        if self._is_stale or self.now_s > self._fresh_until_s:
            self._refit()
        values = self._sd
        return values[rows - 1] if rows <= len(values) else max(0.0, _beyond(rows, values))

    @property
    def optimism(self) -> float:
        """Standard deviations by which a width may be better than it looks, and is worth a trial.

        The more was run, the more improbable chances are taken, as in the paper's experiments.
        """
        return min(MOST_OPTIMISM, sqrt(0.8 * log(4 * max(1, self._learned))))

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
        from carpool.schedule.regression import fit  # numpy: 0.1 s that `--help` need not wait

        with self._changing:
            most = min(MOST, self._known + BEYOND)
            points = self._points() or {1: WidthMedian(1.0, COLD)}  # a kind that never ran: a guess
            fitted = fit(points, noise=self._noise, most=most)
            self._sd = fitted.sd.tolist()
            weights = [1 / max(one, 1e-9) ** 2 for one in self._sd]
            self._seconds = monotone(fitted.seconds.tolist(), weights)
            self._speedups = {}
            self._fitted_s, self._runs_since_fit = self.now_s, 0
            self._fits += 1
            self._fresh_until_s = self.now_s + self._forgotten_s
            self._is_stale = False  # last: until then another thread must not take what is there

    def _points(self) -> dict[int, WidthMedian]:
        now_s, forgotten_s = self.now_s, self._forgotten_s

        def newness(at_s: float) -> float:
            return max(LEAST_WEIGHT, exp((at_s - now_s) / forgotten_s))

        seen: dict[int, list[tuple[float, float]]] = {}
        for rows, prior in self._prior.items():
            seen.setdefault(rows, []).append((prior.seconds, prior.weight * newness(0.0)))
        for rows, (seconds, at_s) in self._first.items():
            seen.setdefault(rows, []).append((seconds, COLD * newness(at_s)))
        for rows, runs in self._runs.items():
            pairs = [(block.seconds, block.weight * newness(block.at_s)) for block in runs]
            seen.setdefault(rows, []).extend(pairs)
        return {
            rows: WidthMedian(weighted_median(pairs), sum(weight for _, weight in pairs))
            for rows, pairs in seen.items()
        }

    @property
    def _forgotten_s(self) -> float:
        return max(FORGOTTEN_S, FORGOTTEN * self._mean_s)


def _beyond(rows: int, values: list[float]) -> float:
    """What follows, in a line, the values of a list that begins with one row."""
    return values[-1] + (rows - len(values)) * (values[-1] - values[-2])
