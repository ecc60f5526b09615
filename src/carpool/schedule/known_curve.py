"""A curve that is known: the simulator's, or the medians that `carpool tune` measured.

Widths that were run often enough have the median of their last seconds, made monotone; between two
of them seconds go in a line; beyond the widest they go on as between the last two, or, after a
single one, as if half of a row were free. It has the interface of a `LearnedCurve`
(`learned_curve.py`), which knows how uncertain it is.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from carpool.schedule.monotone import monotone

KEPT = 15  # of the last seconds of one width
TRUSTED = 3  # so many give a median that one outlier does not move
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # widths that are tried, in rows
UNKNOWN_SLOPE = 0.5  # of the first row's seconds, for each row more


class Curve:
    """Seconds of a forward by its rows, for one kind of call."""

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        """Begin with nothing, or with seconds by rows that somebody measured."""
        self._seen: dict[int, deque[float]] = {
            rows: deque([seconds] * TRUSTED, KEPT) for rows, seconds in (measured or {}).items()
        }
        self._table: list[float] | None = None  # seconds by rows, up to a little beyond
        self._speedups: dict[int, float] = {}  # by the most rows
        self._widest = self._known = 0  # 0: not known

    @property
    def is_empty(self) -> bool:
        return not self._seen

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by rows, of widths that were run often enough; monotone."""
        trusted = {n: seen for n, seen in sorted(self._seen.items()) if len(seen) >= TRUSTED}
        medians = [statistics.median(seen) for seen in trusted.values()]
        return dict(
            zip(trusted, monotone(medians, [len(s) for s in trusted.values()]), strict=True)
        )

    def learn(self, rows: int, seconds: float) -> None:
        seen = self._seen.setdefault(rows, deque(maxlen=KEPT))
        if len(seen) < TRUSTED or len(seen) < KEPT or seconds != seen[-1]:
            seen.append(seconds)
            self._table = None
            self._speedups.clear()
            self._widest = self._known = 0

    def seconds(self, rows: int) -> float:
        """How long a forward of so many rows is likely to take."""
        table = self._table
        if table is None:
            table = self._table = self._tabulate()
        if rows < len(table):
            return table[rows]
        slope = table[-1] - table[-2]
        return table[-1] + (rows - len(table) + 1) * slope

    def sd(self, rows: int) -> float:
        """Nothing: what is known is not uncertain."""
        return 0.0

    def median_sd(self, rows: int) -> float:
        """Standard deviation of the median of a width's runs, from how far they lie apart.

        Normal errors: 1.4826 times the median deviation is that of a run, and 1.2533 over the root
        of their number that of the median.
        """
        seen = self._seen[rows]
        middle = statistics.median(seen)
        deviation = statistics.median(abs(seconds - middle) for seconds in seen)
        return 1.2533 * 1.4826 * deviation / math.sqrt(len(seen))

    @property
    def runs(self) -> dict[int, int]:
        """Runs that are remembered, by rows."""
        return {rows: len(seen) for rows, seen in sorted(self._seen.items())}

    @property
    def is_proven(self) -> bool:
        """Whether it stands on several runs, or on a table."""
        return bool(self.measured)

    def speedup(self, most: int) -> float:
        """How many times as fast calls of one row are done at the best width of at most so many."""
        known = self._speedups.get(most)
        if known is None:
            alone_s = self.seconds(1)
            known = max(n * alone_s / self.seconds(n) for n in range(1, most + 1))
            self._speedups[most] = known
        return known

    def widest(self) -> int:
        """The widest forward that is worth trying: one step beyond what was measured."""
        if not self._widest:
            self._known = max((n for n, s in self._seen.items() if len(s) >= TRUSTED), default=0)
            self._widest = next((s for s in STEPS if s > self._known), self._known + 16)
        return self._widest

    def may_try(self, rows: int, more: int) -> bool:
        """Whether a forward of so many rows is no wider than is worth trying.

        Args:
            more: of them, those that the last call adds: they are a step, too.
        """
        return rows <= max(self.widest(), self._known + more if self._known else 0)

    def _tabulate(self) -> list[float]:
        points = self.measured
        if not points and self._seen:  # only a few runs yet: better than nothing
            rows = min(self._seen)
            points = {rows: min(self._seen[rows])}
        if not points:
            return [0.0, 1.0, 1.0 + UNKNOWN_SLOPE]
        known = list(points.items())
        first_rows, first = known[0]
        if len(known) == 1:
            per_row = first * UNKNOWN_SLOPE / (1 + UNKNOWN_SLOPE * (first_rows - 1))
        else:
            last_rows, last = known[-1]
            before_rows, before = known[-2]
            per_row = (last - before) / (last_rows - before_rows)
        table = [0.0] + [first] * first_rows  # a narrower one does not take longer
        for (left, low), (right, high) in pairwise(known):
            table += [low + (high - low) * i / (right - left) for i in range(1, right - left + 1)]
        return [*table, table[-1] + per_row]
