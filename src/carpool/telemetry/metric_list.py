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
        "histogram", ("model", "endpoint", "outcome"), "from such a request to its answer's end"
    ),
    "carpool_images_total": MetricInfo("counter", ("model",), "pictures in answers and of jobs"),
    "carpool_video_seconds_total": MetricInfo(
        "counter", ("model",), "length of videos that were made"
    ),
    "carpool_first_preview_seconds": MetricInfo(
        "histogram", ("model",), "from a request for a stream to the first preview in it"
    ),
    "carpool_jobs_total": MetricInfo(
        "counter",
        ("model", "kind", "outcome"),
        "jobs that ended: ok, failed, cancelled (or deleted), expired; the request that "
        "created one is counted by itself",
    ),
    "carpool_job_duration_seconds": MetricInfo(
        "histogram", ("model", "kind", "outcome"), "from such a job's acceptance to its end"
    ),
    "carpool_jobs": MetricInfo(
        "gauge",
        ("model", "state"),
        "jobs that are queued, in_progress; of several models together, with an empty `model`",
    ),
    "carpool_build_info": MetricInfo(
        "gauge", ("version", "torch", "diffusers", "revision"), "always 1; what runs"
    ),
    "carpool_worker_up": MetricInfo(
        "gauge", ("model", "worker", "device"), "of several workers: 1 where it is ready, else 0"
    ),
    "carpool_worker_requests": MetricInfo(
        "gauge", ("model", "worker"), "requests that were given to one of several workers"
    ),
    "carpool_moves_total": MetricInfo(
        "counter",
        ("model", "why"),
        "running requests that others of several workers were to go on with: drain, priority",
    ),
    "carpool_requests_held": MetricInfo(
        "gauge", ("model",), "requests that wait until one of several workers has room"
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
        "histogram", ("model",), "time in the queue, of requests that started"
    ),
    "carpool_steps_total": MetricInfo("counter", ("model",), "denoising steps of requests"),
    "carpool_steps_skipped_total": MetricInfo(
        "counter", ("model",), "those of them that `step_cache` answered without a forward"
    ),
    "carpool_tokens_total": MetricInfo(
        "counter", ("model",), "tokens of text that requests let a model of the pipeline write"
    ),
    "carpool_conditioning_hits_total": MetricInfo(
        "counter", ("model",), "calls of encoders that the conditioning cache answered"
    ),
    "carpool_conditioning_misses_total": MetricInfo(
        "counter", ("model",), "calls that ran, and that it may keep"
    ),
    "carpool_conditioning_bytes": MetricInfo("gauge", ("model",), "memory that it takes"),
    "carpool_deadlines_missed_total": MetricInfo(
        "counter", ("model",), "requests that ended after their deadline_s"
    ),
    "carpool_forward_duration_seconds": MetricInfo(
        "histogram", ("model", "component"), "time of one forward"
    ),
    "carpool_forward_rows": MetricInfo("histogram", ("component",), "batch rows in a forward"),
    "carpool_forward_requests": MetricInfo("histogram", ("component",), "requests in a forward"),
    "carpool_forwards_not_wider_total": MetricInfo(
        "counter", ("component", "why"), "forwards, by the reason why they were not wider"
    ),
    "carpool_probation_forwards_total": MetricInfo(
        "counter",
        ("model", "outcome"),
        "forwards that were run apart and together to prove how calls fuse: agreed, differed "
        "(its calls run alone), unsettled (the module changed)",
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
        "gauge", ("model",), "time of forwards just now over the usual one"
    ),
    "carpool_device_memory_bytes": MetricInfo(
        "gauge", ("device", "kind"), "weights; reserved by torch (CUDA); peak in use"
    ),
}
"""Those after `carpool_requests_held` come from workers, with a label `worker` where there are
several; the others from the front."""
