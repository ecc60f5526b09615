"""Cost estimator: seconds of a forward by its rows, for one kind of call, from noisy forwards.

*A width* has the median of its recent runs, pulled towards a line `a + b * rows` through all widths
as if the line were a few more runs: one odd run, or one wrong entry of a table, counts for little.
Between measured widths seconds are interpolated, beyond them they follow the line. Old runs lose
weight, so a width that has not run for long returns to the line.

*The machine's speed* divides every run: the median of recent ratios of measured to expected
seconds, over all kinds and widths. A busy minute changes the speed, not the choice of widths.

*Trials.* `hoped_s` is `seconds` less a bonus for few runs. A policy that runs the width with the
least hoped seconds tries each width as often as needed to know it, and decay brings every width
back. No trial is more than twice as wide as all runs before.

Sources: upper confidence bounds, Auer, Cesa-Bianchi and Fischer, Finite-time Analysis of the
Multiarmed Bandit Problem, Machine Learning 47, 2002; iteratively reweighted least squares with
Cauchy weights, Holland and Welsch, Communications in Statistics A6, 1977.
"""

import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log, sqrt

MISFIT = 0.15  # relative sd of widths from the line; a point twice as far has half its weight
HALF_LIFE = 300  # runs of a kind until a run's weight halves; also the runs kept per width
OPTIMISM = 3.0  # standard deviations subtracted from the seconds of a width in a trial
RECENT = 9  # runs whose median ratio is the machine's speed


@dataclass(slots=True, eq=False)
class _Run:
    seconds: float  # logarithm
    slowdown: float | None  # log ratio to the median of its width; None: too few runs of the width
    baseline: float = 0.0  # logarithm of its seconds at baseline speed


class MachineSpeed:
    """The machine's current speed, and the spread of runs: shared by all curves."""

    def __init__(self) -> None:
        self.baseline = 0.0  # logarithm of usual seconds over the curves' seconds
        self.slowdown = 0.0  # logarithm of current seconds over usual ones
        self.noise = 0.1  # relative standard deviation of a run
        self._recent: deque[_Run] = deque(maxlen=RECENT)

    def learn(self, run: _Run) -> None:
        """Learn from a run; the middle one of the last runs is corrected by the speed around it."""
        self._recent.append(run)
        slowdowns = [run.slowdown for run in self._recent if run.slowdown is not None]
        now = statistics.median(slowdowns) if slowdowns else self.baseline + self.slowdown
        if run.slowdown is not None:
            deviation = min(abs(run.slowdown - now), 4 * self.noise)
            self.noise = max(0.02, self.noise + (1.25 * deviation - self.noise) / HALF_LIFE)
        if abs(now - self.baseline) <= self.noise:  # within noise
            now = self.baseline
        self.baseline += (now - self.baseline) / 4096  # a lasting change becomes usual
        self.slowdown = now - self.baseline
        run.baseline = run.seconds - now
        middle = self._recent[len(self._recent) // 2]
        middle.baseline = middle.seconds - now


class Curve:
    """Seconds of a forward by its rows. Starts empty, or with a table.

    Args:
        table: seconds by rows.
        weight: number of runs that each entry stands for; inf: exact, never updated.
    """

    def __init__(self, table: Mapping[int, float] | None = None, weight: float = inf) -> None:
        self.speed = MachineSpeed()  # `Costs` shares one among its curves
        self.weight = weight if table else 0.0
        self._table = {rows: log(max(s, 1e-12)) for rows, s in (table or {}).items()}
        self._runs: dict[int, deque[_Run]] = {}
        self._medians: dict[int, float] = {}  # keyed by rows
        self._counts: dict[int, tuple[float, int]] = {}  # decayed runs, and the kind's total then
        self._total = 0  # runs of the kind
        self._max_measured = max(self._table, default=0)
        self._seconds: list[float] = []  # cached, by rows - 1
        self._sd: list[float] = []  # relative, by rows - 1
        self._speedups: dict[int, float] = {}  # cached, by max rows
        self._is_stale = True
        self._lock = threading.Lock()  # submitting threads read while the engine's thread learns

    @property
    def is_known(self) -> bool:
        """Whether the table is exact: nothing is learned."""
        return self.weight == inf

    @property
    def is_empty(self) -> bool:
        return not (self._table or self._runs)

    @property
    def is_young(self) -> bool:
        """Whether so few runs were seen that each forward may be a trial."""
        return self._total < HALF_LIFE

    @property
    def is_proven(self) -> bool:
        """Whether it has a table, or several runs of one width."""
        return bool(self._table) or any(len(runs) > 2 for runs in self._runs.values())

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by rows, for the widths of the table and of the runs."""
        table = {rows: exp(s + self.speed.baseline) for rows, s in self._table.items()}
        return dict(sorted((table | {rows: self.seconds(rows) for rows in self._runs}).items()))

    def runs(self, rows: int) -> float:
        """Decayed number of runs of a width in this process."""
        runs, when = self._counts.get(rows, (0.0, 0))
        return max(1e-9, runs * float(0.5 ** ((self._total - when) / HALF_LIFE)))

    def has_run(self, rows: int, times: int = 1) -> bool:
        """Whether a width has run in this process, so many times."""
        return len(self._runs.get(rows, ())) >= times

    def learn(self, rows: int, *seconds: float) -> None:
        """Learn from runs."""
        if self.is_known:
            return
        is_first, is_expected = rows not in self._runs, not self.is_empty
        expected = log(self._remembered_s(rows)) if is_first else 0.0
        with self._lock:
            runs = self._runs.setdefault(rows, deque(maxlen=HALF_LIFE))
            median = self._medians[rows] if len(runs) >= RECENT else None  # None: too few runs
            for s in map(log, seconds):
                run = _Run(s, None if median is None else s - median)
                self.speed.learn(run)
                if is_first and is_expected and not runs:  # a first run may allocate, compile, ...
                    run.seconds = min(run.seconds, expected + run.seconds - run.baseline)
                    run.baseline = min(run.baseline, expected)
                runs.append(run)
            self._total += len(seconds)
            self._medians[rows] = statistics.median([run.baseline for run in runs])
            self._counts[rows] = min(HALF_LIFE, self.runs(rows) + len(seconds)), self._total
            self._max_measured = max(self._max_measured, rows)
            self._is_stale = True

    def seconds(self, rows: int) -> float:
        """The usual seconds of a forward of `rows` rows."""
        if self._is_stale or rows > len(self._seconds):
            return self._remembered_s(rows) * exp(self.speed.baseline)
        return self._seconds[rows - 1] * exp(self.speed.baseline)

    def sd(self, rows: int) -> float:
        """Standard deviation of `seconds`."""
        seconds = self.seconds(rows)
        if self.is_known:
            return 0.0
        return seconds * (self._sd[rows - 1] if rows <= len(self._sd) else self._sd[-1])

    def hoped_s(self, rows: int) -> float:
        """An optimistic estimate of the seconds of a forward."""
        seconds = self.seconds(rows)
        return max(0.5 * seconds, seconds - OPTIMISM * self.sd(rows))

    def speedup(self, max_rows: int) -> float:
        """Throughput of one-row calls at the best width up to `max_rows`, against one alone."""
        if self._is_stale or max_rows not in self._speedups:
            alone_s, rows = self._remembered_s(1), range(1, max_rows + 1)
            self._speedups[max_rows] = max([n * alone_s / self._remembered_s(n) for n in rows])
        return self._speedups[max_rows]

    def may_try(self, rows: int, step: int) -> bool:
        """Whether a forward is at most twice as wide as all before, or one call of `step` wider."""
        max_measured = self._max_measured
        return rows <= max(2, 2 * max_measured, max_measured + step if max_measured else 0)

    def _remembered_s(self, rows: int) -> float:
        if self._is_stale:
            with self._lock:
                self._fit()
        seconds = self._seconds
        if rows <= len(seconds):
            return seconds[rows - 1]
        return seconds[-1] + (rows - len(seconds)) * (seconds[-1] - seconds[-2])

    def _fit(self) -> None:
        """Recompute the seconds of all widths."""
        points = self._points()
        line_s = _line(points)
        known_s, sd = dict[int, float](), dict[int, float]()
        for rows in sorted({rows for rows, _, _ in points}):
            line, sure = log(line_s(rows)), 0.0 if self.is_known else MISFIT**-2
            total = sure * line
            for width, seconds, variance in points:
                if width == rows:
                    weight = 1 / (variance * (1 + ((seconds - line) / (2 * MISFIT)) ** 2))
                    total, sure = total + weight * seconds, sure + weight
            known_s[rows], sd[rows] = exp(total / sure), sqrt(1 / sure)
        first, last = min(known_s, default=1), max(known_s, default=1)
        table_rows = 2 * max(self._max_measured, 1) + 1
        made_s = [known_s.get(first, line_s(first))] * first  # narrower forwards take no longer
        for (low, _), (right, high_s) in pairwise(known_s.items()):
            step_s = max(0.0, high_s - made_s[-1]) / (right - low)
            made_s += [made_s[-1] + step_s * n for n in range(1, right - low + 1)]
        times = made_s[-1] / line_s(last)
        made_s += [max(made_s[-1], times * line_s(n)) for n in range(last + 1, table_rows + 1)]
        other_sd = 0.0 if self.is_known else MISFIT
        self._sd = [sd.get(n, other_sd) for n in range(1, table_rows + 1)]
        self._seconds, self._is_stale = made_s, False
        self._speedups.clear()

    def _points(self) -> list[tuple[int, float, float]]:
        """Widths, logarithms of their seconds, and the variances."""
        weight = self.weight * 0.5 ** (self._total / HALF_LIFE)
        variance = 1e-12 if self.is_known else MISFIT**2 / max(weight, 1e-9)
        points = [(rows, seconds, variance) for rows, seconds in self._table.items()]
        for rows, seconds in self._medians.items():
            points.append((rows, seconds, self.speed.noise**2 / self.runs(rows)))
        return points


def _line(points: Sequence[tuple[int, float, float]]) -> Callable[[int], float]:
    """A weighted line through seconds by rows, robust to outliers.

    With little data, half the cost of each further row is assumed to be free.
    """
    rows, seconds, _ = min(points, key=lambda point: point[2], default=(1, 0.0, 1.0))
    a = b = exp(seconds) / (1 + rows)
    data = [(n, exp(s), 1 / (variance + MISFIT**2)) for n, s, variance in points]
    data += [(n, a + b * n, 1.0) for n in (1, 2 * rows)]
    for _ in range(4):
        aa = ab = bb = ay = by = 0.0  # the normal equations of relative errors
        for n, s, weight in data:
            miss = log((a + b * n) / s)
            weight /= (1 + (miss / (2 * MISFIT)) ** 2) * s * s
            aa, ab, bb = aa + weight, ab + weight * n, bb + weight * n * n
            ay, by = ay + weight * s, by + weight * n * s
        det = aa * bb - ab * ab
        a, b = max(0.0, (ay * bb - by * ab) / det), max(0.0, (by * aa - ay * ab) / det)
        if not a or not b:  # rows gain nothing, or cost nothing
            a, b = (0.0, by / bb) if b else (ay / aa, 0.0)
    return lambda n: a + b * n
