"""Prometheus metrics: counters of the front, and the worker's statistics as metrics.

The front counts its answers and jobs itself. Metrics of the engine are made from the worker's
statistics at each scrape; they start at 0 again with a new worker, as Prometheus' `rate` expects,
and are absent while there is none. Labels are never prompts, ids or paths.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import inf
from operator import getitem
from types import MappingProxyType
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.metrics import Counter, Histogram
from prometheus_client.registry import Collector

from carpool.telemetry.metric_list import METRICS
from carpool.telemetry.worker_statistics import models_of, workers_of
from carpool.types import BUCKETS_S

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
BUCKETS_ROWS = (1, 2, 4, 8, 16, 32, 64)
_NUMBERS = {  # by metric of the engine: the place in its statistics
    "requests_running": "running",
    "requests_waiting": "waiting",
    "overload_stage": "overload stage",
    "wait_seconds": "overload wait_s",
    "steps_total": "steps",
    "steps_skipped_total": "steps_skipped",
    "tokens_total": "tokens",
    "deadlines_missed_total": "deadlines_missed",
    "conditioning_hits_total": "conditioning hits",
    "conditioning_misses_total": "conditioning misses",
    "conditioning_bytes": "conditioning bytes",
    "machine_speed_factor": "speed_factor",
}
MEMORY = {"weights": "weights_bytes", "reserved": "reserved_bytes", "peak": "peak_bytes"}

MetricFamily = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
MetricValues = tuple[str, dict[Any, Any]]
"""The name of a metric, and its values by labels."""
_FAMILIES: dict[str, type[MetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Metrics:
    """The metrics of one front, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("carpool_requests_total")
        self._durations = self._histogram("carpool_request_duration_seconds")
        self._images = self._counter("carpool_images_total")
        self._video_seconds = self._counter("carpool_video_seconds_total")
        self._previews = self._histogram("carpool_first_preview_seconds")
        self._jobs = self._counter("carpool_jobs_total")
        self._job_durations = self._histogram("carpool_job_duration_seconds")

    def _counter(self, name: str) -> Counter:
        return Counter(name, METRICS[name].text, METRICS[name].labels, registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        about = METRICS[name]
        return Histogram(name, about.text, about.labels, buckets=BUCKETS_S, registry=self._registry)

    def answered(self, model: str, endpoint: str, status: int, duration_s: float) -> None:
        """Count the answer to a POST request.

        Args:
            endpoint: the route's template, never the path itself.
            status: status of the HTTP answer; 499 if the client disconnected.
        """
        labels = (model, endpoint, _outcome(status))
        self._requests.labels(*labels).inc()
        self._durations.labels(*labels).observe(duration_s)

    def drew(self, model: str, images: int) -> None:
        """Count the pictures of an answer or a job."""
        self._images.labels(model).inc(images)

    def filmed(self, model: str, length_s: float) -> None:
        """Count the length of a video."""
        self._video_seconds.labels(model).inc(length_s)

    def previewed(self, model: str, after_s: float) -> None:
        """Record the time from a request to the first preview in its stream."""
        self._previews.labels(model).observe(after_s)

    def ended(self, model: str, kind: str, outcome: str, duration_s: float) -> None:
        """Count the end of a job, and record its duration."""
        self._jobs.labels(model, kind, outcome).inc()
        self._job_durations.labels(model, kind, outcome).observe(duration_s)

    def page(
        self,
        model: str,
        build: Mapping[str, str],
        statistics: Mapping[str, Any] | None,
        jobs: Mapping[str, int] = MappingProxyType({}),
        workers: Sequence[Mapping[str, Any]] = (),
    ) -> bytes:
        """All metrics as text. With several workers, the engine's have a label `worker` too.

        Args:
            build: versions and revision, the labels of `carpool_build_info`.
            statistics: statistics of the engine, or of several; None: no worker answers.
            jobs: numbers of open jobs, by state.
            workers: if there are several: `model`, `worker`, `device`, `state`, `requests`.
        """
        scraped = _Scraped(model, build, statistics, jobs, workers)
        return generate_latest(self._registry) + generate_latest(scraped)


@dataclass(frozen=True, slots=True)
class _Scraped(Collector):
    """Collects the values of one scrape: see `Metrics.page`."""

    model: str
    build: Mapping[str, str]
    statistics: Mapping[str, Any] | None
    jobs: Mapping[str, int]
    workers: Sequence[Mapping[str, Any]]

    def collect(self) -> Iterator[Metric]:
        open_jobs = {(self.model, state): count for state, count in self.jobs.items()}
        yield _family("carpool_jobs", open_jobs)
        yield _family("carpool_build_info", {tuple(self.build.values()): 1})
        if self.workers:
            models = models_of(self.model, self.statistics or {})
            states = {(w["model"], str(w["worker"]), w["device"]): w for w in self.workers}
            up = {labels: float(worker["state"] == "ready") for labels, worker in states.items()}
            yield _family("carpool_worker_up", up)
            bound = {labels[:2]: worker["requests"] for labels, worker in states.items()}
            yield _family("carpool_worker_requests", bound)
            yield _family("carpool_requests_held", _held(models))
            yield _family("carpool_moves_total", _moves(models))
        workers = [] if self.statistics is None else workers_of(self.model, self.statistics)
        merged: dict[str, dict[Any, Any]] = {}
        for entry in workers:
            number = () if entry.worker is None else (entry.worker,)
            for name, values in _of_engine(entry.model, entry.statistics):
                by_labels = merged.setdefault(name, {})
                by_labels |= {(*labels, *number): value for labels, value in values.items()}
        is_several = any(entry.worker is not None for entry in workers)
        for name, values in merged.items():
            yield _family(name, values, ("worker",) if is_several else ())


def _held(models: Mapping[str, Any]) -> dict[tuple[str], int]:
    """Requests that are held for a worker, by model."""
    return {(name,): model["held"]["requests"] for name, model in models.items() if "held" in model}


def _moves(models: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Requests that moved between workers, by model and reason."""
    return {
        (name, why): count
        for name, model in models.items()
        for why, count in model.get("moves", {}).items()
    }


def _of_engine(model: str, statistics: Mapping[str, Any]) -> Iterator[MetricValues]:
    for name, path in _NUMBERS.items():
        yield f"carpool_{name}", {(model,): reduce(getitem, path.split(), statistics)}
    queued = _buckets(statistics["waits"]["histogram"])
    yield "carpool_request_queue_seconds", {(model,): queued}
    memory = statistics["memory"]
    sizes = {kind: memory[key] for kind, key in MEMORY.items() if key in memory}
    device = memory["device"]
    yield "carpool_device_memory_bytes", {(device, kind): size for kind, size in sizes.items()}
    fusing = statistics["fusing"]
    tried = {(model, outcome): n for outcome, n in fusing["forwards"].items()}
    yield "carpool_probation_forwards_total", tried
    yield "carpool_call_kinds", {(model, state): n for state, n in fusing["kinds"].items()}
    yield from _of_forwards(model, statistics)
    for name, key in (("carpool_cost_seconds", "seconds"), ("carpool_cost_sd_seconds", "sd")):
        costs = {
            (f"{cost['name']} {cost['detail'] or cost['size']}", str(rows)): seconds
            for cost in statistics["costs"]
            for rows, seconds in cost[key].items()
        }
        yield name, costs


def _of_forwards(model: str, statistics: Mapping[str, Any]) -> Iterator[MetricValues]:
    yield (
        "carpool_forward_duration_seconds",
        {(model, e["component"]): _buckets(e["histogram"]) for e in statistics["seconds"]},
    )
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for entry in statistics["forwards"]:
        methods.setdefault(f"{entry['component']}.{entry['method']}", []).append(entry)
    for measure in ("rows", "requests"):
        widths = {(method,): _widths(entries, measure) for method, entries in methods.items()}
        yield f"carpool_forward_{measure}", widths
    yield (
        "carpool_forwards_not_wider_total",
        {(e["component"], e["why"]): e["count"] for e in statistics["not_wider"]},
    )


def _family(name: str, values: Mapping[Any, Any], extra: tuple[str, ...] = ()) -> Metric:
    """Make a metric from its values by labels: numbers, or buckets with their sum.

    Args:
        extra: further labels.
    """
    info = METRICS[name]
    family = _FAMILIES[info.type](name, info.text, labels=(*info.labels, *extra))
    for labels, value in values.items():
        family.add_metric(labels, *(value if isinstance(value, tuple) else (value,)))
    return family


def _buckets(histogram: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    bounds = [_text(bound) for bound in (*histogram["bounds"], inf)]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"]


def _widths(
    entries: Iterable[Mapping[str, Any]], measure: str
) -> tuple[list[tuple[str, float]], float]:
    sizes = [(entry[measure], entry["count"]) for entry in entries]
    buckets = [
        (_text(bound), float(sum(count for size, count in sizes if size <= bound)))
        for bound in (*BUCKETS_ROWS, inf)
    ]
    return buckets, sum(size * count for size, count in sizes)


def _text(bound: float) -> str:
    return "+Inf" if bound == inf else str(float(bound))


def _outcome(status: int) -> str:
    if status == 499:
        return "cancelled"
    return "ok" if status < 400 else "rejected" if status < 500 else "failed"
