"""Health, version, `/stats`, `/metrics`, live events, and timelines of single requests."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Response

import carpool
from carpool.server import dependencies
from carpool.server.bodies import schema
from carpool.server.bodies import schema_reports as reports
from carpool.server.bodies.forms import validated
from carpool.server.image_request import ParsedImageRequest
from carpool.server.openai_fields import video_request
from carpool.server.responses.stream import STREAMED, EventStream
from carpool.server.transport.middleware import IS_HEAD
from carpool.telemetry.metrics import CONTENT_TYPE

public = APIRouter(responses=dependencies.FORBIDDEN)
router = dependencies.router_of(dependencies.AuthenticatedRoute)
_UNHEALTHY: dict[str, Any] = {
    "responses": {503: {"model": reports.Health}},
    "response_model_exclude_none": True,
}


@public.get("/health", **_UNHEALTHY)
@public.get("/health_generate", **_UNHEALTHY)  # SGLang's path; it draws nothing
async def health(response: Response, state: dependencies.ServerState) -> reports.Health:
    """200 if a worker is ready; `degraded` if others are not. A full queue changes nothing."""
    fleet, workers = state.fleet, None
    response.status_code = 200 if fleet.state == "ready" else 503
    if fleet.has_several or any(pool.ranks > 1 for pool in fleet.pools):
        workers = [reports.WorkerHealth.model_validate(worker) for worker in fleet.workers()]
    return reports.Health(
        status="degraded" if fleet.is_degraded else fleet.state,
        workers=workers,
        private=fleet.private_tasks or None,
    )


@public.get("/livez")
async def livez() -> dict[str, str]:
    """The HTTP process is alive, whatever the model's state."""
    return {"status": "alive"}


@public.get("/version", description="The versions of Carpool and its libraries.")
async def version(state: dependencies.ServerState) -> dict[str, str]:
    ready = state.fleet.ready
    return {"carpool": carpool.__version__, **(ready.versions if ready else {})}


@router.get("/stats")
async def stats(state: dependencies.ServerState) -> dict[str, Any]:
    """Statistics of the engine: its state, and counters since it started."""
    return await state.fleet.statistics()


@router.get("/metrics", response_class=Response)
async def metrics(state: dependencies.ServerState) -> Response:
    """The same statistics and more, for Prometheus."""
    return Response(await state.observer.metrics(), media_type=CONTENT_TYPE)


@router.get("/v1/events", response_model=None, responses=STREAMED)
async def events(
    context: dependencies.Context,
    seconds: Annotated[float | None, Query(ge=0, description="end after this many seconds")] = None,
) -> EventStream:
    """Live events of the engine and of the client's own jobs, until the client disconnects.

    Events: `status`, `activity`, `stats`, `job`, `prompt` and `preview` (docs/playground.md).
    """
    if context.request.scope.get(IS_HEAD):
        seconds = 0.0
    stream = context.state.events.follow(context.client.owner, seconds)
    return EventStream(await anext(stream), stream)


@router.post("/v1/estimates")
async def estimate(
    values: Annotated[dict[str, Any], Body(examples=[{"prompt": "a red circle"}])],
    context: dependencies.Context,
) -> reports.EstimateReport:
    """Check a body of `POST /v1/images/generations` or `/v1/videos` and predict its time.

    Nothing is drawn. The time is for one output.
    """
    name = values.get("model") if isinstance(values.get("model"), str) else None
    model = await context.load(name, "ready")
    if model.card.tasks[0].makes == "videos":
        body, limit = validated(schema.VideoRequest, values), context.state.settings.max_frames
        checked, _ = video_request(model, body, limit, client=context.client)
    else:
        drawing = validated(schema.ImageRequest, values)
        checked = ParsedImageRequest(model, drawing, context.client).requests[0]
    times = await context.state.fleet.estimate(checked)
    return reports.EstimateReport(seconds=times.seconds, wait_s=times.wait_s, speed=times.speed)


@router.get("/v1/requests/{request_id}")
async def report(request_id: str, context: dependencies.Context) -> reports.RequestReport:
    """The timeline of a request: phases, waits, and requests that shared its forwards.

    For a job's id: its last run, without outputs while the job is queued.
    """
    return await context.state.observer.report(context.client.owner, request_id)
