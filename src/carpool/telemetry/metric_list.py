"""Every metric of a server: its name, type, labels and help text."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """Type, labels and help text of a metric."""

    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str


METRICS: dict[str, MetricInfo] = {
    "carpool_requests_total": MetricInfo(
        "counter",
        ("model", "endpoint", "outcome"),
        "answers to POST requests: ok, rejected (status below 500), failed, cancelled",
    ),
    "carpool_request_duration_seconds": MetricInfo(
        "histogram", ("model", "endpoint", "outcome"), "from a POST request to its answer's end"
    ),
    "carpool_images_total": MetricInfo("counter", ("model",), "pictures in answers and of jobs"),
    "carpool_video_seconds_total": MetricInfo(
        "counter", ("model",), "total length of the videos made"
    ),
    "carpool_first_preview_seconds": MetricInfo(
        "histogram", ("model",), "from the request of a stream to its first preview"
    ),
    "carpool_jobs_total": MetricInfo(
        "counter",
        ("model", "kind", "outcome"),
        "ended jobs: ok, failed, cancelled (or deleted), expired; the request that created one "
        "counts separately",
    ),
    "carpool_job_duration_seconds": MetricInfo(
        "histogram", ("model", "kind", "outcome"), "from a job's acceptance to its end"
    ),
    "carpool_jobs": MetricInfo(
        "gauge",
        ("model", "state"),
        "open jobs: queued, in_progress; with several models a total, with an empty `model`",
    ),
    "carpool_build_info": MetricInfo(
        "gauge", ("version", "torch", "diffusers", "revision"), "always 1; labels: what runs"
    ),
    "carpool_worker_up": MetricInfo(
        "gauge", ("model", "worker", "device"), "if there are several workers: 1: ready, 0: not"
    ),
    "carpool_worker_requests": MetricInfo(
        "gauge", ("model", "worker"), "if there are several workers: its requests"
    ),
    "carpool_moves_total": MetricInfo(
        "counter",
        ("model", "why"),
        "moves of running requests to other workers, by reason: drain, priority",
    ),
    "carpool_requests_held": MetricInfo(
        "gauge", ("model",), "if there are several workers: requests that wait for room"
    ),
    "carpool_requests_running": MetricInfo("gauge", ("model",), "running requests"),
    "carpool_requests_waiting": MetricInfo("gauge", ("model",), "queued requests"),
    "carpool_overload_stage": MetricInfo(
        "gauge",
        ("model",),
        "1: no previews; 2: no new requests of priority below 0; 3: no new requests",
    ),
    "carpool_wait_seconds": MetricInfo(
        "gauge", ("model",), "predicted time until the queue is empty"
    ),
    "carpool_request_queue_seconds": MetricInfo(
        "histogram", ("model",), "time in the queue of started requests"
    ),
    "carpool_steps_total": MetricInfo("counter", ("model",), "denoising steps of requests"),
    "carpool_steps_skipped_total": MetricInfo(
        "counter", ("model",), "denoising steps without a forward, by `step_cache`"
    ),
    "carpool_tokens_total": MetricInfo(
        "counter", ("model",), "text tokens written by models of the pipeline"
    ),
    "carpool_conditioning_hits_total": MetricInfo(
        "counter", ("model",), "encoder calls answered by the conditioning cache"
    ),
    "carpool_conditioning_misses_total": MetricInfo(
        "counter", ("model",), "encoder calls that ran and may be kept"
    ),
    "carpool_conditioning_bytes": MetricInfo("gauge", ("model",), "memory of that cache"),
    "carpool_deadlines_missed_total": MetricInfo(
        "counter", ("model",), "requests that ended after their deadline_s"
    ),
    "carpool_forward_duration_seconds": MetricInfo(
        "histogram", ("model", "component"), "time of one forward"
    ),
    "carpool_forward_rows": MetricInfo("histogram", ("component",), "batch rows in a forward"),
    "carpool_forward_requests": MetricInfo("histogram", ("component",), "requests in a forward"),
    "carpool_forwards_not_wider_total": MetricInfo(
        "counter", ("component", "why"), "forwards by the reason that they were not wider"
    ),
    "carpool_probation_forwards_total": MetricInfo(
        "counter",
        ("model", "outcome"),
        "forwards run separately and together to verify how calls fuse: agreed, differed (their "
        "calls run alone), unsettled (the module changed)",
    ),
    "carpool_call_kinds": MetricInfo(
        "gauge",
        ("model", "fuses"),
        "kinds of calls by how they fuse: table, proven, probation, alone",
    ),
    "carpool_cost_seconds": MetricInfo(
        "gauge", ("kind", "rows"), "predicted time of one forward, at the machine's usual speed"
    ),
    "carpool_cost_sd_seconds": MetricInfo(
        "gauge", ("kind", "rows"), "standard deviation of the prediction"
    ),
    "carpool_machine_speed_factor": MetricInfo(
        "gauge", ("model",), "current time of forwards over the usual one"
    ),
    "carpool_device_memory_bytes": MetricInfo(
        "gauge", ("device", "kind"), "weights; reserved by torch (CUDA); peak in use"
    ),
}
"""Metrics after `carpool_requests_held` come from workers, with a label `worker` if there are
several; all others come from the front."""
