"""What a server tells of itself: `/stats`, `/metrics`, and the lives of single requests."""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import carpool
from carpool.config import ServeSettings
from carpool.errors import CarpoolError, JobNotFound, NoSuchEndpoint
from carpool.jobs.database import Record
from carpool.jobs.runner import Output, Runner
from carpool.server.bodies import schema
from carpool.telemetry import tracing
from carpool.telemetry.metrics import CONTENT_TYPE, Metrics
from carpool.types import CheckedRequest
from carpool.worker.supervisor import Supervisor

log = logging.getLogger("carpool")

KEPT = 1000  # requests, as many as the engine keeps
Asked = tuple[str, str, str]
"""A request, its owner and id; or a job, nothing and its id."""
OUTCOMES = {"completed": "ok"}  # the other ends of jobs are called as they are


class Observer:
    """Counts answers and jobs, and knows which requests to the engine were made of which of them.

    It watches the runner, if there is one; see `jobs.runner.JobListener`.
    """

    def __init__(
        self, supervisor: Supervisor, settings: ServeSettings, runner: Runner | None = None
    ) -> None:
        self._supervisor, self._settings, self._runner = supervisor, settings, runner
        self._metrics = Metrics()
        self._parts: OrderedDict[Asked, list[str]] = OrderedDict()
        if runner is not None:
            runner.watch(self)

    @property
    def _model(self) -> str:
        """The served model's name; nothing before it is known."""
        ready = self._supervisor.ready
        return self._settings.served_model_name or (ready.card.id if ready else "")

    def began(self, request: Request, owner: str, jobs: Sequence[CheckedRequest]) -> None:
        """These jobs were made of a request. An id that comes again means the youngest."""
        tracing.asked(self._model, [job.seed for job in jobs], "image")
        self._note(("request", owner, request.scope["request_id"]), jobs)

    def runs(self, record: Record, parts: Sequence[CheckedRequest]) -> None:
        """A job is run: in the trace of the request that it came with."""
        tracing.take_up(str(record.work.get("trace", "")))
        self._note(("job", "", record.id), parts)

    def _note(self, asked: Asked, jobs: Sequence[CheckedRequest]) -> None:
        if self._settings.log_prompts:
            prompt = jobs[0].arguments.get("prompt")
            log.info("%s asks for %r", asked[2], prompt)
        self._parts.pop(asked, None)
        self._parts[asked] = [job.request_id for job in jobs]
        if len(self._parts) > KEPT:
            self._parts.popitem(last=False)

    def ended(self, record: Record, state: str, took_s: float, done: Sequence[Output]) -> None:
        """A job has ended."""
        self._metrics.ended(self._model, record.kind, OUTCOMES.get(state, state), took_s)
        clips = [one.clip for one in done if one.clip is not None]
        if len(done) > len(clips):
            self._metrics.drew(self._model, len(done) - len(clips))
        for clip in clips:
            self._metrics.filmed(self._model, clip.length / record.work["output"]["fps"])

    def previewed(self, after_s: float) -> None:
        """The first preview of a request is sent."""
        self._metrics.previewed(self._model, after_s)

    def drew(self, images: int) -> None:
        """An answer has so many pictures."""
        self._metrics.drew(self._model, images)

    def answered(self, endpoint: str, status: int, duration_s: float) -> None:
        """A request for work was answered."""
        self._metrics.answered(self._model, endpoint, status, duration_s)

    async def life(self, owner: str, request_id: str) -> schema.RequestLife:
        """What became of a request that the same API key made, or of a job in its last run.

        Raises:
            NoSuchEndpoint: it is not known, or not any more.
            Starting, WorkerLost, Draining: there is no worker to ask.
        """
        asked: Asked = "request", owner, request_id
        job = None if asked in self._parts else await self._job(owner, request_id)
        parts = self._parts.get(asked if job is None else ("job", "", job.id), [])
        lives = await self._supervisor.timelines(parts) if parts else []
        if not lives and not (job is not None and job.is_open):
            raise NoSuchEndpoint(
                f"no request {request_id[:128]!r} is known: the id is `x-request-id` of its "
                f"answer, or a job's, and the last {KEPT} since the worker started are kept"
            )
        return schema.RequestLife(
            id=request_id, outputs=[schema.Life.model_validate(life) for life in lives]
        )

    async def _job(self, owner: str, job_id: str) -> Record | None:
        with contextlib.suppress(JobNotFound):
            return None if self._runner is None else await self._runner.get(job_id, owner)
        return None

    async def metrics(self) -> bytes:
        """The page for Prometheus. Without a worker it has the front's own counts only."""
        statistics: dict[str, Any] | None = None
        if self._supervisor.state in ("ready", "draining"):
            try:
                statistics = await self._supervisor.statistics()
            except CarpoolError:  # it died while it was asked
                statistics = None
        jobs: dict[Any, int] = {}
        if self._runner is not None:
            with contextlib.suppress(CarpoolError):  # the disk's fault, and not the page's
                jobs = await self._runner.count_open()
        ready = self._supervisor.ready
        versions = {"torch": "", "diffusers": "", **(ready.versions if ready else {})}
        build = {
            "version": carpool.__version__,
            "torch": versions["torch"],
            "diffusers": versions["diffusers"],
            "revision": self._settings.revision or "",
        }
        return self._metrics.page(self._model, build, statistics, jobs)


def routes(
    observer: Observer,
    supervisor: Supervisor,
    authorised: Callable[..., Any],
    owner: Callable[..., Any],
    errors: Any,
) -> APIRouter:
    """The endpoints. All want an API key where there are any.

    Args:
        authorised: dependency: the name of the client's key.
        owner: dependency: whose jobs it sees.
        errors: for the OpenAPI document.
    """
    api = APIRouter(dependencies=[Depends(authorised)], responses=errors)

    @api.get("/stats")
    async def stats() -> dict[str, Any]:
        """What the engine does just now and has done so far."""
        return await supervisor.statistics()

    @api.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The same and more for Prometheus."""
        return Response(await observer.metrics(), media_type=CONTENT_TYPE)

    @api.get("/v1/requests/{request_id}")
    async def life(request_id: str, whose: Annotated[str, Depends(owner)]) -> schema.RequestLife:
        """What a request did when, with how many it rode, and what it waited for.

        A job's id stands for its last run; as long as it waits for that, it has no outputs.
        """
        return await observer.life(whose, request_id)

    return api


class Observed:
    """Tells the observer of every answer to a request for work."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app, self._observer = app, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began_s = 500, time.monotonic()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            if scope.get("method") == "POST" and (route := scope.get("route")) is not None:
                self._observer.answered(
                    route.path, scope.get("ended_as", status), time.monotonic() - began_s
                )
