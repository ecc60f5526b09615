"""Histograms of an engine, by prometheus_client without a registry, as plain statistics."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from prometheus_client.metrics import Histogram

__all__ = ["Histogram", "histogram", "statistics_of"]


def histogram(bounds: Sequence[float]) -> Histogram:
    """A histogram of durations, in seconds, with these upper bounds."""
    return Histogram("seconds", "of an engine", buckets=bounds, registry=None)


def statistics_of(histogram: Histogram) -> dict[str, Any]:
    """The bounds, and the number of values between each and the one before it."""
    [metric] = histogram.collect()
    values = {(s.name, s.labels.get("le")): s.value for s in metric.samples}
    cumulative = {le: int(value) for (_, le), value in values.items() if le is not None}
    return {
        "bounds": [float(bound) for bound in list(cumulative)[:-1]],  # the last one is infinite
        "counts": [after - before for before, after in pairwise([0, *cumulative.values()])],
        "sum": values["seconds_sum", None],
    }
