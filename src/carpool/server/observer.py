"""Counts answers and jobs for Prometheus; maps HTTP requests to engine requests."""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import Request

import carpool
from carpool.config import ServeSettings
from carpool.errors import CarpoolError, JobNotFound, NoSuchEndpoint
from carpool.fleet.fleet import Fleet
from carpool.jobs.database import Record
from carpool.jobs.interfaces import JobListener
from carpool.jobs.runner import Runner
from carpool.server.bodies import schema
from carpool.server.bodies import schema_reports as reports
from carpool.telemetry import tracing
from carpool.telemetry.metrics import Metrics
from carpool.types import CheckedRequest

log = logging.getLogger("carpool")

KEPT_REQUESTS = 1000  # requests; the engine keeps as many
Origin = tuple[Literal["request", "job"], str, str]
"""Origin of engine requests: request or job, the owner of its API key, and its id."""


class Observer(JobListener):
    """The front's own metrics, and the HTTP request or job of each engine request."""

    def __init__(self, fleet: Fleet, settings: ServeSettings, runner: Runner) -> None:
        self._fleet, self._settings, self._runner = fleet, settings, runner
        self._metrics = Metrics()
        self.first_preview = self._metrics.previewed
        self._request_ids: OrderedDict[Origin, list[str]] = OrderedDict()
        self._origins: dict[str, Origin] = {}  # key: id of an engine request
        runner.listen(self)

    @property
    def model(self) -> str:
        """The served model's name; "" if unknown or if there are several models."""
        return self._fleet.names[0] if self._fleet.is_single else ""

    def began(self, request: Request, owner: str, requests: Sequence[CheckedRequest]) -> None:
        """Record an HTTP request's engine requests; a later request with its id replaces it."""
        tracing.asked(requests[0].model or self.model, [part.seed for part in requests], "image")
        self._note(("request", owner, request.scope["request_id"]), requests)

    def runs(self, record: Record, parts: Sequence[CheckedRequest]) -> None:
        """Record the engine requests of a job; it continues the trace of its HTTP request."""
        tracing.take_up(str(record.work.get("trace", "")))
        self._note(("job", record.owner, record.id), parts)

    def _note(self, origin: Origin, requests: Sequence[CheckedRequest]) -> None:
        if self._settings.log_prompts:
            log.info("%s asks for %r", origin[2], requests[0].arguments.get("prompt"))
        self._forget(self._request_ids.pop(origin, ()))
        self._request_ids[origin] = [part.request_id for part in requests]
        self._origins |= dict.fromkeys(self._request_ids[origin], origin)
        if len(self._request_ids) > KEPT_REQUESTS:
            self._forget(self._request_ids.popitem(last=False)[1])

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._origins.pop(request_id, None)

    def ended(self, record: Record, state: str, took_s: float, outputs: Sequence[Any]) -> None:
        """Count the end of a job, and its outputs."""
        model = str(record.asked.get("model") or self.model)
        outcome = "ok" if state == "completed" else state
        self._metrics.ended(model, record.kind, outcome, took_s)
        clips = [output.clip for output in outputs if output.clip is not None]
        if drawings := sum(bool(output.pictures) for output in outputs):
            self._metrics.drew(model, drawings)
        for clip in clips:
            self._metrics.filmed(model, clip.length / record.work["output"]["fps"])

    def drew(self, model: str, images: int, usage: schema.UsageBody) -> None:
        """Count the pictures and tokens of an answer."""
        if images:
            self._metrics.drew(model, images)
        tracing.used(usage.input_tokens, usage.output_tokens)

    def answered(self, model: str, endpoint: str, status: int, duration_s: float) -> None:
        """Count the answer to a work request.

        Args:
            model: the model's name, if there are several; "": unknown name, or a single model.
        """
        self._metrics.answered(model or self.model, endpoint, status, duration_s)

    async def report(self, owner: str, request_id: str) -> reports.RequestReport:
        """The timelines of a request of the same API key, or of a job's last run.

        Raises:
            NoSuchEndpoint: the request is unknown or was forgotten.
            Starting, WorkerLost, Draining: no worker is available.
        """
        origin: Origin = "request", owner, request_id
        job = None
        if origin not in self._request_ids:
            with contextlib.suppress(JobNotFound):
                job = await self._runner.get(request_id, owner)
                origin = "job", owner, job.id
        parts = self._request_ids.get(origin, [])
        outputs = await self._fleet.timelines(parts) if parts else []
        if not outputs and not (job is not None and job.is_open):
            raise NoSuchEndpoint(
                f"no request {request_id[:128]!r} is known: the id is `x-request-id` of its "
                f"answer, or a job's, and the last {KEPT_REQUESTS} since the worker started are "
                "kept"
            )
        for phase in (phase for output in outputs for phase in output["phases"]):
            names = (self.own_name(output_id, owner) for output_id in phase["others"])
            phase["others"] = list(dict.fromkeys(name[0] if name else "another" for name in names))
        return reports.RequestReport.model_validate({"id": request_id, "outputs": outputs})

    def own_name(self, output_id: str, owner: str) -> tuple[str, int] | None:
        """The id of the HTTP request or job behind an engine request, and the index of its output;
        None if another owner sent it."""
        origin = self._origins.get(output_id)
        if origin is None or origin[1] != owner:
            return None
        return origin[2], self._request_ids[origin].index(output_id)

    async def metrics(self) -> bytes:
        """The page for Prometheus. Without a worker it has only the front's metrics."""
        statistics: dict[str, Any] | None = None
        jobs: dict[Any, int] = {}
        with contextlib.suppress(CarpoolError):  # the worker died during the call
            if self._fleet.state in ("ready", "draining"):
                statistics = await self._fleet.statistics()
        with contextlib.suppress(CarpoolError):  # a failing disk must not break the page
            jobs = await self._runner.count_open()
        ready = self._fleet.ready
        versions = ready.versions if ready else {}
        build = {"version": carpool.__version__, "revision": self._settings.revision or ""}
        build |= {name: versions.get(name, "") for name in ("torch", "diffusers")}
        workers = self._fleet.workers() if self._fleet.has_several else []
        return self._metrics.page(self.model, build, statistics, jobs, workers)
