"""What Prometheus reads: the front's own counts, and the worker's statistics as metrics.

The front counts what it answers. All about forwards comes from the worker when it is asked: its
counts begin at 0 again when it is replaced, as Prometheus' `rate` expects of a process, and are
absent while there is none. Labels are never prompts, ids or paths of requests.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
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

from carpool.types import BUCKETS_S

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
BUCKETS_ROWS = (1, 2, 4, 8, 16, 32, 64)
MEMORY = {"weights": "weights_bytes", "reserved": "reserved_bytes", "peak": "peak_bytes"}

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
_FAMILIES: dict[str, type[Family]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class About:
    """What a metric is."""

    type: str
    labels: tuple[str, ...]
    text: str


ALL: dict[str, About] = {
    "carpool_requests_total": About(
        "counter",
        ("model", "endpoint", "outcome"),
        "answers to POST requests: ok, rejected (status below 500), failed, cancelled",
    ),
    "carpool_request_duration_seconds": About(
        "histogram", ("model", "endpoint", "outcome"), "from such a request to its answer's end"
    ),
    "carpool_images_total": About("counter", ("model",), "pictures in answers"),
    "carpool_build_info": About(
        "gauge", ("version", "torch", "diffusers", "revision"), "always 1; what runs"
    ),
    "carpool_requests_running": About("gauge", ("model",), "requests aboard"),
    "carpool_requests_waiting": About("gauge", ("model",), "requests in the line"),
    "carpool_overload_stage": About(
        "gauge",
        ("model",),
        "1: no previews; 2: no new requests of priority below 0; 3: no new requests",
    ),
    "carpool_wait_seconds": About(
        "gauge", ("model",), "predicted, for the work of those that wait"
    ),
    "carpool_request_queue_seconds": About(
        "histogram", ("model",), "time in the line, of requests that came aboard"
    ),
    "carpool_steps_total": About("counter", ("model",), "denoising steps of requests"),
    "carpool_deadlines_missed_total": About(
        "counter", ("model",), "requests that ended after their deadline_s"
    ),
    "carpool_forward_duration_seconds": About(
        "histogram", ("model", "component"), "time of one forward"
    ),
    "carpool_forward_rows": About("histogram", ("component",), "batch rows in a forward"),
    "carpool_forward_requests": About("histogram", ("component",), "requests in a forward"),
    "carpool_forwards_not_wider_total": About(
        "counter", ("component", "why"), "forwards, by what kept others from riding along"
    ),
    "carpool_device_memory_bytes": About(
        "gauge", ("device", "kind"), "weights; reserved by torch (CUDA); peak in use"
    ),
}
"""The first four are the front's own; those after them come from the worker."""


class Metrics:
    """All metrics of one front, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            *_front("carpool_requests_total"),
            registry=self._registry,
        )
        self._durations = Histogram(
            *_front("carpool_request_duration_seconds"),
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._images = Counter(*_front("carpool_images_total"), registry=self._registry)
        self._worker = _Worker()
        self._registry.register(self._worker)

    def answered(self, model: str, endpoint: str, status: int, duration_s: float) -> None:
        """A request for work was answered.

        Args:
            endpoint: the route, never what stood in its place.
            status: of the HTTP answer; 499 if the client was gone.
        """
        labels = (model, endpoint, _outcome(status))
        self._requests.labels(*labels).inc()
        self._durations.labels(*labels).observe(duration_s)

    def drew(self, model: str, images: int) -> None:
        """An answer has so many pictures."""
        self._images.labels(model).inc(images)

    def page(
        self, model: str, build: Mapping[str, str], statistics: Mapping[str, Any] | None
    ) -> bytes:
        """All metrics as text.

        Args:
            build: versions and revision, the labels of `carpool_build_info`.
            statistics: of the engine; None while there is no worker to ask.
        """
        self._worker.seen = model, build, statistics
        return generate_latest(self._registry)


class _Worker(Collector):
    """The engine's statistics, as last seen."""

    def __init__(self) -> None:
        self.seen: tuple[str, Mapping[str, str], Mapping[str, Any] | None] = "", {}, None

    def describe(self) -> Iterable[Metric]:
        return []  # else the registry would collect to know the names

    def collect(self) -> Iterator[Metric]:
        model, build, statistics = self.seen
        yield _family("carpool_build_info", {tuple(build.values()): 1})
        if statistics is None:
            return
        for key in ("running", "waiting"):
            yield _family(f"carpool_requests_{key}", {(model,): statistics[key]})
        for name, key in (("overload_stage", "stage"), ("wait_seconds", "wait_s")):
            yield _family(f"carpool_{name}", {(model,): statistics["overload"][key]})
        for key in ("steps", "deadlines_missed"):
            yield _family(f"carpool_{key}_total", {(model,): statistics[key]})
        queued = _buckets(statistics["waits"]["histogram"])
        yield _family("carpool_request_queue_seconds", {(model,): queued})
        memory = statistics["memory"]
        sizes = {kind: memory[key] for kind, key in MEMORY.items() if key in memory}
        yield _family(
            "carpool_device_memory_bytes",
            {(memory["device"], kind): size for kind, size in sizes.items()},
        )
        yield from _of_forwards(model, statistics)


def _of_forwards(model: str, statistics: Mapping[str, Any]) -> Iterator[Metric]:
    yield _family(
        "carpool_forward_duration_seconds",
        {(model, one["component"]): _buckets(one["histogram"]) for one in statistics["seconds"]},
    )
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for entry in statistics["forwards"]:
        methods.setdefault(f"{entry['component']}.{entry['method']}", []).append(entry)
    for what in ("rows", "requests"):
        widths = {(method,): _widths(entries, what) for method, entries in methods.items()}
        yield _family(f"carpool_forward_{what}", widths)
    yield _family(
        "carpool_forwards_not_wider_total",
        {(one["component"], one["why"]): one["count"] for one in statistics["not_wider"]},
    )


def _front(name: str) -> tuple[str, str, tuple[str, ...]]:
    about = ALL[name]
    return name, about.text, about.labels


def _family(name: str, values: Mapping[Any, Any]) -> Metric:
    """A metric with its values by labels: numbers, or buckets with their sum."""
    about = ALL[name]
    family = _FAMILIES[about.type](name, about.text, labels=about.labels)
    for labels, value in values.items():
        family.add_metric(labels, *(value if isinstance(value, tuple) else (value,)))
    return family


def _buckets(histogram: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    bounds = [_text(bound) for bound in (*histogram["bounds"], inf)]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"]


def _widths(
    entries: Iterable[Mapping[str, Any]], what: str
) -> tuple[list[tuple[str, float]], float]:
    sizes = [(entry[what], entry["count"]) for entry in entries]
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
