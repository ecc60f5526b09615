"""What a server reports of itself: health, versions, `/stats`, `/metrics`, single requests."""

from typing import Any

from fastapi import APIRouter, Depends, Response

import carpool
from carpool.fleet.fleet import Fleet
from carpool.fleet.pool import Pool
from carpool.server.bodies import schema
from carpool.server.dependencies import (
    ERRORS,
    AuthenticatedRoute,
    Context,
    State,
    request_context,
)
from carpool.telemetry.metrics import CONTENT_TYPE

_FORBIDDEN: dict[int | str, dict[str, Any]] = {403: ERRORS[403]}  # by Host or Origin

public = APIRouter(responses=_FORBIDDEN)
router = APIRouter(
    route_class=AuthenticatedRoute, responses=ERRORS, dependencies=[Depends(request_context)]
)


@public.get("/health", responses={503: {"model": schema.Health}}, response_model_exclude_none=True)
async def health(response: Response, state: State) -> schema.Health:
    """200 when a request would be accepted now; `degraded` when not every worker is ready."""
    serving = state.supervisor
    response.status_code = 200 if serving.state == "ready" else 503
    if not isinstance(serving, (Fleet, Pool)) or not serving.has_several:
        return schema.Health(status=state.supervisor.state, workers=None)
    workers = [schema.WorkerHealth.model_validate(one) for one in state.observer.workers()]
    return schema.Health(
        status="degraded" if serving.is_degraded else serving.state, workers=workers
    )


@public.get("/livez")
async def livez() -> dict[str, str]:
    """The HTTP process turns; says nothing about the model."""
    return {"status": "alive"}


@public.get("/version")
async def version(state: State) -> dict[str, str]:
    ready = state.supervisor.ready
    return {"carpool": carpool.__version__, **(ready.versions if ready else {})}


@router.get("/stats")
async def stats(state: State) -> dict[str, Any]:
    """What the engine does just now and has done so far."""
    return await state.supervisor.statistics()


@router.get("/metrics", response_class=Response)
async def metrics(state: State) -> Response:
    """The same and more for Prometheus."""
    return Response(await state.observer.metrics(), media_type=CONTENT_TYPE)


@router.get("/v1/requests/{request_id}")
async def report(request_id: str, context: Context) -> schema.RequestReport:
    """What a request did when, with which others it shared forwards, and what it waited for.

    A job's id means its last run; while the job is queued it has no outputs.
    """
    return await context.state.observer.report(context.client.owner, request_id)
