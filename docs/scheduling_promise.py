"""The promise of the `continuous` mode, checked at simulated points.

On the same requests, relative to the best other mode: the ratio of mean latencies is on average at
most 1.01 with known costs and 1.03 with learned costs, and at each point at most 1.06 and 1.12. The
limits of 99th percentiles are 1.05 and 1.20. If fusing pays and requests differ in steps and
guidance, at 0.9 of capacity, at least 1.5 times as many requests are in time.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from carpool_lab.simulate.report import Point

AVERAGE_MEAN = {False: 1.01, True: 1.03}  # mean of ratios; key: costs are learned
MOST_MEAN = {False: 1.06, True: 1.12}  # limit of a point; key: costs are learned
AVERAGE_P99 = 1.05
MOST_P99 = 1.20
LEAST_GOODPUT = 1.5
GOODPUT_LOAD = 0.9


@dataclass(frozen=True, slots=True)
class Verdict:
    """`continuous` against the best other mode, at one load of one table and mix."""

    table: str
    mix: str
    load: float
    mean: float  # times the best
    p99: float  # times the best
    goodput: float  # relative to `dynamic` or `request`; inf: both are 0
    must_fuse: bool  # the promise includes goodput
    is_learned: bool = False  # costs are learned
    seeds: int = 1

    @property
    def broken(self) -> list[str]:
        """The broken parts of the promise at this point."""
        broken = []
        if self.mean > MOST_MEAN[self.is_learned]:
            broken.append(f"mean {self.mean:.3f} > {MOST_MEAN[self.is_learned]}")
        if self.p99 > MOST_P99:
            broken.append(f"p99 {self.p99:.3f} > {MOST_P99}")
        if self.must_fuse and self.goodput < LEAST_GOODPUT:
            broken.append(f"goodput {self.goodput:.2f} < {LEAST_GOODPUT}")
        return broken

    def __str__(self) -> str:
        return f"{self.table}, {self.mix}, load {self.load:g}: {', '.join(self.broken) or 'kept'}"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit over all points, and its measured value."""

    name: str
    value: float
    most: float

    @property
    def is_kept(self) -> bool:
        return self.value <= self.most


def limits(verdicts: Sequence[Verdict], *, is_learned: bool) -> Iterator[Limit]:
    """Yield the limits for mean and worst ratios, of mean latencies and 99th percentiles."""
    means, p99s = [point.mean for point in verdicts], [point.p99 for point in verdicts]
    yield Limit("mean latency, mean of ratios", statistics.fmean(means), AVERAGE_MEAN[is_learned])
    yield Limit("mean latency, worst point", max(means), MOST_MEAN[is_learned])
    yield Limit("p99, mean of ratios", statistics.fmean(p99s), AVERAGE_P99)
    yield Limit("p99, worst point", max(p99s), MOST_P99)


def verdicts(
    points: Sequence[Point], fusing_pays: Sequence[str], *, is_learned: bool = False
) -> list[Verdict]:
    """Compare `continuous` with the best other mode at every load.

    Args:
        points: all modes for every table, mix and load.
        fusing_pays: tables with a promise of higher goodput.
        is_learned: use the promise for learned costs.
    """
    by_load: dict[tuple[str, str, float], dict[str, Point]] = {}
    for point in points:
        by_load.setdefault((point.table, point.mix, point.load), {})[point.mode] = point
    return [
        _verdict(key, modes, key[0] in fusing_pays, is_learned) for key, modes in by_load.items()
    ]


def _verdict(
    key: tuple[str, str, float], points: dict[str, Point], fusing_pays: bool, is_learned: bool
) -> Verdict:
    table, mix, load = key
    modes = {mode: point.numbers for mode, point in points.items()}
    ours = modes.pop("continuous")
    batched = max(modes[mode].goodput_qps for mode in ("dynamic", "request"))
    return Verdict(
        table,
        mix,
        load,
        ours.latency.mean_s / min(numbers.latency.mean_s for numbers in modes.values()),
        ours.latency.p99_s / min(numbers.latency.p99_s for numbers in modes.values()),
        ours.goodput_qps / batched if batched else inf,
        fusing_pays and mix == "steps" and load == GOODPUT_LOAD,
        is_learned,
        points["continuous"].seeds,
    )
