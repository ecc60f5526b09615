"""The promise of the `continuous` mode, held up to simulated points.

On the same requests, against the best of the other modes: its mean latency is at most 6 % longer
and its p99 at most 20 %; and where fusing pays and requests differ in steps and guidance, at 0.9 of
capacity, at least 1.5 times as many are in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from carpool_lab.simulate.report import Point

MOST_MEAN = 1.06
MOST_P99 = 1.20
MOST_MEAN_LEARNED = 1.12  # the same, where costs are learned from disturbed forwards
MOST_P99_LEARNED = 1.20
LEAST_GOODPUT = 1.5
GOODPUT_LOAD = 0.9


@dataclass(frozen=True, slots=True)
class Verdict:
    """`continuous` against the best of the other modes, at one load of one table and mix."""

    table: str
    mix: str
    load: float
    mean: float  # times the best
    p99: float  # times the best
    goodput: float  # times the better of `dynamic` and `request`; inf: they have none
    must_fuse: bool  # whether the promise is about goodput, too
    error: float = 0.0  # standard error of `mean`; 0: not known
    seeds: int = 1
    most_mean: float = MOST_MEAN  # what is promised
    most_p99: float = MOST_P99

    @property
    def broken(self) -> list[str]:
        """What the promise says and this does not keep."""
        found = []
        if self.mean > self.most_mean:
            found.append(f"mean {self.mean:.3f} > {self.most_mean}")
        if self.p99 > self.most_p99:
            found.append(f"p99 {self.p99:.3f} > {self.most_p99}")
        if self.must_fuse and self.goodput < LEAST_GOODPUT:
            found.append(f"goodput {self.goodput:.2f} < {LEAST_GOODPUT}")
        return found

    def __str__(self) -> str:
        return f"{self.table}, {self.mix}, load {self.load:g}: {', '.join(self.broken) or 'kept'}"


def verdicts(
    points: Sequence[Point], fusing_pays: Sequence[str], *, is_learned: bool = False
) -> list[Verdict]:
    """Hold the promise up to every load.

    Args:
        points: all modes for every table, mix and load.
        fusing_pays: tables of which more goodput is promised.
        is_learned: the promise is that for learned costs.
    """
    most = (MOST_MEAN_LEARNED, MOST_P99_LEARNED) if is_learned else (MOST_MEAN, MOST_P99)
    found: dict[tuple[str, str, float], dict[str, Point]] = {}
    for point in points:
        found.setdefault((point.table, point.mix, point.load), {})[point.mode] = point
    return [
        _verdict(table, mix, load, dict(modes), table in fusing_pays, most)
        for (table, mix, load), modes in found.items()
    ]


def _verdict(
    table: str,
    mix: str,
    load: float,
    points: dict[str, Point],
    fusing_pays: bool,
    most: tuple[float, float],
) -> Verdict:
    modes = {mode: point.numbers for mode, point in points.items()}
    ours = modes.pop("continuous")
    batched = max(modes[mode].goodput_qps for mode in ("dynamic", "request"))
    return Verdict(
        table,
        mix,
        load,
        ours.latency.mean_s / min(one.latency.mean_s for one in modes.values()),
        ours.latency.p99_s / min(one.latency.p99_s for one in modes.values()),
        ours.goodput_qps / batched if batched else inf,
        fusing_pays and mix == "steps" and load == GOODPUT_LOAD,
        points["continuous"].error,
        points["continuous"].seeds,
        *most,
    )
