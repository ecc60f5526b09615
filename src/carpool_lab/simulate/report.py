"""Numbers of simulations: single runs, means of runs, and tables."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np

from carpool_lab.markdown import table
from carpool_lab.simulate.simulator import Result, SimulatedRequest

_SECONDS = ("mean_s", "p50_s", "p95_s", "p99_s")


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of one class of requests, in seconds."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        """The latencies of one or more requests."""
        percentiles = map(float, np.percentile(seconds, (50, 95, 99)))
        return cls(len(seconds), statistics.fmean(seconds), *percentiles)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a simulation, or means of several."""

    throughput_qps: float
    goodput_qps: float  # requests within their target, per second
    slo_attainment: float  # their fraction of all requests
    rows_per_forward: float  # denoising only
    deadlines: int  # requests with a deadline
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
    seeds: int = 1  # number of averaged seeds


def numbers(result: Result, slo_scale: float) -> Numbers:
    """Throughput, goodput and latencies of one simulation.

    Args:
        slo_scale: latency target, as a multiple of the solo latency.
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
        latency=Latency.of([simulated.latency_s for simulated in requests]),
        by_class={
            label: Latency.of([simulated.latency_s for simulated in classes[label]])
            for label in sorted(classes)
        },
    )


def mean(runs: Sequence[Numbers]) -> Numbers:
    """Means over seeds; counts are sums. Each class averages the seeds that have it."""
    labels = {label: None for run in runs for label in run.by_class}
    return Numbers(
        statistics.fmean(run.throughput_qps for run in runs),
        statistics.fmean(run.goodput_qps for run in runs),
        statistics.fmean(run.slo_attainment for run in runs),
        statistics.fmean(run.rows_per_forward for run in runs),
        sum(run.deadlines for run in runs),
        sum(run.deadline_misses for run in runs),
        _mean([run.latency for run in runs]),
        {
            label: _mean([run.by_class[label] for run in runs if label in run.by_class])
            for label in labels
        },
    )


def _mean(latencies: Sequence[Latency]) -> Latency:
    seconds = ([getattr(its, name) for its in latencies] for name in _SECONDS)
    return Latency(sum(latency.count for latency in latencies), *map(statistics.fmean, seconds))


def plotted(point: Point) -> tuple[str, float, tuple[float, float, float]]:
    """A point of `carpool_lab.plot.draw`."""
    latency, in_time = point.numbers.latency, point.numbers.slo_attainment
    return point.mode, point.load, (latency.mean_s, latency.p99_s, in_time)


# As text

HEADS = ("mode", "load", "req/s", "in time/s", "in time", "mean s", "p50 s", "p95 s", "p99 s",
         "rows", "misses")  # fmt: skip


def comparison(points: Sequence[Point]) -> str:
    """The points as a Markdown table."""
    return table(HEADS, map(_row, points))


def _row(point: Point) -> list[str]:
    numbers, latency = point.numbers, point.numbers.latency
    misses = f"{numbers.deadline_misses}/{numbers.deadlines}" if numbers.deadlines else "-"
    seconds = [getattr(latency, name) for name in _SECONDS]
    return [
        point.mode,
        f"{point.load:g}",
        f"{numbers.throughput_qps:.3g}",
        f"{numbers.goodput_qps:.3g}",
        f"{numbers.slo_attainment:.0%}",
        *(f"{number:.3g}" for number in seconds),
        f"{numbers.rows_per_forward:.1f}",
        misses,
    ]


def block(numbers: Numbers, settings: Mapping[str, Any]) -> str:
    """One simulation as text."""
    return "\n".join(_lines(numbers, settings))


def _lines(numbers: Numbers, settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        yield f"{name + ':':<28} {value}"
    yield f"{'throughput (req/s):':<28} {numbers.throughput_qps:.4g}"
    in_time = f"{numbers.slo_attainment:.1%} in time"
    yield f"{'goodput (req/s):':<28} {numbers.goodput_qps:.4g}, {in_time}"
    yield f"{'rows a denoising forward:':<28} {numbers.rows_per_forward:.2f}"
    if numbers.deadlines:
        yield f"{'deadlines missed:':<28} {numbers.deadline_misses} of {numbers.deadlines}"
    yield ""
    classes = {"all": numbers.latency} | dict(numbers.by_class)
    yield table(
        ["class", "requests", "mean s", "p50 s", "p95 s", "p99 s"],
        (
            [label, its.count, *map("{:.4g}".format, (its.mean_s, its.p50_s, its.p95_s, its.p99_s))]
            for label, its in classes.items()
        ),
    )


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]
