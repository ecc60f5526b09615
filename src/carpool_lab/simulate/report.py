"""What simulations come to: numbers of one, tables of many, and a promise held up to them.

The promise, about `continuous` against the best of the other modes on the same requests: its mean
latency is never more than 2 % longer and its p99 never more than 10 %; and where fusing pays and
requests differ in steps and guidance, at 0.9 of capacity, at least 1.5 times as many are in time.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from carpool.config import BatchingMode
from carpool_lab.simulate.simulator import Result, SimulatedRequest

MOST_MEAN = 1.02
MOST_P99 = 1.10
MOST_MEAN_LEARNED = 1.05  # the same, where costs are learned from disturbed forwards
MOST_P99_LEARNED = 1.15
LEAST_GOODPUT = 1.5
GOODPUT_LOAD = 0.9


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one class of requests, seconds."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Numbers:
    """A simulation, or the means of several."""

    throughput_qps: float
    goodput_qps: float  # requests within the target, a second
    slo_attainment: float  # their share of all
    rows_per_forward: float  # of denoising
    deadlines: int  # requests that had one
    deadline_misses: int
    latency: Latency
    by_class: Mapping[str, Latency]


@dataclass(frozen=True, slots=True)
class Point:
    """One mode at one load of one table and mix."""

    table: str
    mix: str
    load: float
    mode: str
    numbers: Numbers
    seeds: int = 1  # whose means the numbers are
    error: float = 0.0  # standard error of the mean latency over the best of the other modes'


def numbers(result: Result, slo_scale: float) -> Numbers:
    """What a simulation of one or more requests came to.

    Args:
        slo_scale: a request is in time within so many times its solo latency.
    """
    requests = result.requests
    classes: dict[str, list[SimulatedRequest]] = {}
    for simulated in requests:
        classes.setdefault(simulated.label, []).append(simulated)
    good = sum(simulated.latency_s <= slo_scale * simulated.solo_s for simulated in requests)
    dated = [simulated for simulated in requests if simulated.waiting.deadline_s < inf]
    return Numbers(
        throughput_qps=len(requests) / result.ended_s,
        goodput_qps=good / result.ended_s,
        slo_attainment=good / len(requests),
        rows_per_forward=result.rows / result.forwards,
        deadlines=len(dated),
        deadline_misses=sum(
            simulated.ended_s > simulated.waiting.deadline_s for simulated in dated
        ),
        latency=_latency(requests),
        by_class={label: _latency(classes[label]) for label in sorted(classes)},
    )


def _latency(requests: Sequence[SimulatedRequest]) -> Latency:
    seconds = [simulated.latency_s for simulated in requests]
    cuts = statistics.quantiles(
        seconds * 2 if len(seconds) == 1 else seconds, n=100, method="inclusive"
    )
    return Latency(len(seconds), statistics.fmean(seconds), cuts[49], cuts[94], cuts[98])


def mean(several: Sequence[Numbers]) -> Numbers:
    """The means over seeds; counts are sums. A class that a seed did not draw is left out of it."""
    labels = {label: None for one in several for label in one.by_class}
    return Numbers(
        statistics.fmean(one.throughput_qps for one in several),
        statistics.fmean(one.goodput_qps for one in several),
        statistics.fmean(one.slo_attainment for one in several),
        statistics.fmean(one.rows_per_forward for one in several),
        sum(one.deadlines for one in several),
        sum(one.deadline_misses for one in several),
        _mean([one.latency for one in several]),
        {
            label: _mean([one.by_class[label] for one in several if label in one.by_class])
            for label in labels
        },
    )


def ratio_of_means(
    mode: BatchingMode,
    seeds: Sequence[Mapping[BatchingMode, Numbers]],
    of: Callable[[Latency], float] = lambda latency: latency.mean_s,
) -> tuple[float, float]:
    """A mode's latency over that of the best of the others, and its standard error.

    Args:
        seeds: the numbers of each mode; infinite error with fewer than two seeds.
        of: which latency; default: the mean.
    """
    ratios = [
        of(found[mode].latency)
        / min((of(one.latency) for name, one in found.items() if name != mode), default=inf)
        for found in seeds
    ]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else inf
    return statistics.fmean(ratios), error


def _mean(several: Sequence[Latency]) -> Latency:
    return Latency(
        sum(one.count for one in several),
        statistics.fmean(one.mean_s for one in several),
        statistics.fmean(one.p50_s for one in several),
        statistics.fmean(one.p95_s for one in several),
        statistics.fmean(one.p99_s for one in several),
    )


# The promise


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


# As text


def comparison(points: Sequence[Point]) -> str:
    """All points as a Markdown table."""
    return "\n".join([_HEAD, _RULE, *map(_row, points)])


_HEAD = (
    "| mode | load | req/s | in time/s | in time | mean s | p50 s | p95 s | p99 s | rows | misses |"
)
_RULE = "| --- " + "| ---: " * 10 + "|"


def _row(point: Point) -> str:
    one, latency = point.numbers, point.numbers.latency
    misses = f"{one.deadline_misses}/{one.deadlines}" if one.deadlines else "-"
    seconds = (latency.mean_s, latency.p50_s, latency.p95_s, latency.p99_s)
    cells = [
        point.mode,
        f"{point.load:g}",
        f"{one.throughput_qps:.3g}",
        f"{one.goodput_qps:.3g}",
        f"{one.slo_attainment:.0%}",
        *(f"{number:.3g}" for number in seconds),
        f"{one.rows_per_forward:.1f}",
        misses,
    ]
    return f"| {' | '.join(cells)} |"


def block(one: Numbers, settings: Mapping[str, Any]) -> str:
    """One simulation as people read it."""
    return "\n".join(_lines(one, settings))


def _lines(one: Numbers, settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        yield f"{name + ':':<28} {value}"
    yield f"{'throughput (req/s):':<28} {one.throughput_qps:.4g}"
    yield f"{'goodput (req/s):':<28} {one.goodput_qps:.4g}, {one.slo_attainment:.1%} in time"
    yield f"{'rows a denoising forward:':<28} {one.rows_per_forward:.2f}"
    if one.deadlines:
        yield f"{'deadlines missed:':<28} {one.deadline_misses} of {one.deadlines}"
    yield ""
    yield "| class | requests | mean s | p50 s | p95 s | p99 s |"
    yield "| --- " + "| ---: " * 5 + "|"
    classes = {"all": one.latency} | dict(one.by_class)
    for label, latency in classes.items():
        seconds = (latency.mean_s, latency.p50_s, latency.p95_s, latency.p99_s)
        cells = " | ".join(f"{number:.4g}" for number in seconds)
        yield f"| {label} | {latency.count} | {cells} |"


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]
