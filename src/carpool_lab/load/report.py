"""The report of a run: numbers from request results, as a block of text and as JSON.

Lines and JSON fields have the names of SGLang's and vLLM's benchmarks, where they exist.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from carpool_lab.load.generator import RequestResult

WIDTH = 60


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The number of requests that failed for one reason."""

    reason: str
    count: int
    message: str  # message of the first one


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a run; None if unknown. Latencies are of successful requests, seconds."""

    duration: float  # from the start to the last answer, seconds
    completed_requests: int
    failed_requests: int
    throughput_qps: float  # answers a second
    latency_mean: float | None
    latency_median: float | None
    latency_p90: float | None
    latency_p95: float | None
    latency_p99: float | None
    latency_max: float | None
    send_delay_max: float  # from scheduled time to sending, seconds
    slo_attainment_rate: float | None  # share of all requests; None: no target
    goodput_qps: float | None  # answers within their target, a second
    peak_memory_mb_max: float | None
    failures: tuple[FailureCount, ...]


def summarise(outcomes: Sequence[RequestResult], statistics: Mapping[str, Any]) -> Summary:
    """The numbers of a run.

    Args:
        outcomes: one or more.
        statistics: the server's `/stats` after the run; it supplies memory if the answers did
            not.
    """
    completed = [outcome for outcome in outcomes if outcome.failure is None]
    good = sum(outcome.is_good for outcome in outcomes)
    has_slo = any(isfinite(outcome.slo_s) for outcome in outcomes)
    duration_s = max(max(outcome.done_s for outcome in outcomes), 1e-9)
    latencies = [outcome.latency_s for outcome in completed]

    def percentile(share: float) -> float | None:
        return float(np.percentile(latencies, share)) if latencies else None

    return Summary(
        duration=duration_s,
        completed_requests=len(completed),
        failed_requests=len(outcomes) - len(completed),
        throughput_qps=len(completed) / duration_s,
        latency_mean=float(np.mean(latencies)) if latencies else None,
        latency_median=percentile(50),
        latency_p90=percentile(90),
        latency_p95=percentile(95),
        latency_p99=percentile(99),
        latency_max=percentile(100),
        send_delay_max=max(outcome.sent_s - outcome.at_s for outcome in outcomes),
        slo_attainment_rate=good / len(outcomes) if has_slo else None,
        goodput_qps=good / duration_s if has_slo else None,
        peak_memory_mb_max=_peak_memory_mb(outcomes, statistics),
        failures=_failures(outcomes),
    )


def block(summary: Summary, settings: Mapping[str, Any]) -> str:
    """The result as text.

    Args:
        settings: settings of the run, by displayed name.
    """
    return "\n".join(_lines(summary, settings))


def as_json(
    summary: Summary, settings: Mapping[str, Any], outcomes: Sequence[RequestResult]
) -> dict[str, Any]:
    """The summary as JSON, with every single request."""
    requests = [asdict(outcome) for outcome in outcomes]
    for request in requests:
        if request["slo_s"] == inf:  # JSON has no infinity
            request["slo_s"] = None
    return {"settings": dict(settings), **asdict(summary), "requests": requests}


def _lines(summary: Summary, settings: Mapping[str, Any]) -> Iterator[str]:
    requests = summary.completed_requests + summary.failed_requests
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    for name, value in settings.items():
        yield _line(name, "not set" if value is None else str(value))
    yield _line("Benchmark duration (s)", f"{summary.duration:.2f}")
    yield _line("Successful requests", f"{summary.completed_requests}/{requests}")
    yield "-" * WIDTH
    yield _line("Request throughput (req/s)", _number(summary.throughput_qps))
    yield _line("Latency Mean (s)", _number(summary.latency_mean))
    yield _line("Latency Median (s)", _number(summary.latency_median))
    yield _line("Latency P90 (s)", _number(summary.latency_p90))
    yield _line("Latency P95 (s)", _number(summary.latency_p95))
    yield _line("Latency P99 (s)", _number(summary.latency_p99))
    yield _line("Latency Max (s)", _number(summary.latency_max))
    yield _line("Send Delay Max (s)", _number(summary.send_delay_max))
    yield _line("Peak Memory Max (MB)", _number(summary.peak_memory_mb_max, digits=1))
    if summary.slo_attainment_rate is not None:
        yield "-" * WIDTH
        yield _line("SLO Attainment Rate (all)", f"{summary.slo_attainment_rate:.2%}")
        yield _line("Request goodput (req/s)", _number(summary.goodput_qps))
    if summary.failures:
        yield f"{' Failures ':-^{WIDTH}}"
    for failures in summary.failures:
        yield _line(failures.reason, str(failures.count))
        yield f"  {failures.message}"
    yield "=" * WIDTH


def _line(name: str, value: str) -> str:
    return f"{name + ':':<40} {value}"


def _number(value: float | None, digits: int = 4) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _failures(outcomes: Sequence[RequestResult]) -> tuple[FailureCount, ...]:
    """Failures by reason, the most frequent first."""
    counted = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    first = {outcome.failure: outcome.message for outcome in reversed(outcomes)}
    return tuple(FailureCount(reason, n, first[reason]) for reason, n in counted.most_common())


def _peak_memory_mb(
    outcomes: Sequence[RequestResult], statistics: Mapping[str, Any]
) -> float | None:
    peaks = [outcome.peak_memory_mb for outcome in outcomes if outcome.peak_memory_mb is not None]
    if peaks:
        return max(peaks)
    peak_bytes = (statistics.get("memory") or {}).get("peak_bytes")
    return None if peak_bytes is None else peak_bytes / 2**20
