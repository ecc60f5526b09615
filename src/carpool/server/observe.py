"""What a server tells of itself: `/stats`, `/metrics`, and the lives of single requests."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import carpool
from carpool import tracing
from carpool.config import ServeSettings
from carpool.errors import CarpoolError, NoSuchEndpoint
from carpool.metrics import CONTENT_TYPE, Metrics
from carpool.server import schema
from carpool.supervise import Supervisor
from carpool.types import Job

KEPT = 1000  # requests, as many as the engine keeps


class Observer:
    """Counts answers, and knows which jobs were made of which HTTP request."""

    def __init__(self, supervisor: Supervisor, settings: ServeSettings) -> None:
        self._supervisor, self._settings = supervisor, settings
        self._metrics = Metrics()
        self._jobs: OrderedDict[tuple[str, str], list[str]] = OrderedDict()

    @property
    def _model(self) -> str:
        """The served model's name; nothing before it is known."""
        ready = self._supervisor.ready
        return self._settings.served_model_name or (ready.card.id if ready else "")

    def began(self, request: Request, key: str, jobs: Sequence[Job]) -> None:
        """These jobs were made of a request. An id that comes again means the youngest."""
        tracing.asked(self._model, jobs, "image")
        asked = key, request.scope["request_id"]
        self._jobs.pop(asked, None)
        self._jobs[asked] = [job.request_id for job in jobs]
        if len(self._jobs) > KEPT:
            self._jobs.popitem(last=False)

    def drew(self, images: int) -> None:
        """An answer has so many pictures."""
        self._metrics.drew(self._model, images)

    def answered(self, endpoint: str, status: int, duration_s: float) -> None:
        """A request for work was answered."""
        self._metrics.answered(self._model, endpoint, status, duration_s)

    async def life(self, key: str, request_id: str) -> schema.RequestLife:
        """What became of a request that the same API key made.

        Raises:
            NoSuchEndpoint: it is not known, or not any more.
            Starting, WorkerLost, Draining: there is no worker to ask.
        """
        jobs = self._jobs.get((key, request_id), [])
        if not jobs or not (lives := await self._supervisor.lives(jobs)):
            raise NoSuchEndpoint(
                f"no request {request_id[:128]!r} is known: the id is `x-request-id` of its "
                f"answer, and the last {KEPT} since the worker started are kept"
            )
        return schema.RequestLife(
            id=request_id, outputs=[schema.Life.model_validate(life) for life in lives]
        )

    async def metrics(self) -> bytes:
        """The page for Prometheus. Without a worker it has the front's own counts only."""
        statistics: dict[str, Any] | None = None
        if self._supervisor.state in ("ready", "draining"):
            try:
                statistics = await self._supervisor.statistics()
            except CarpoolError:  # it died while it was asked
                statistics = None
        ready = self._supervisor.ready
        versions = {"torch": "", "diffusers": "", **(ready.versions if ready else {})}
        build = {
            "version": carpool.__version__,
            "torch": versions["torch"],
            "diffusers": versions["diffusers"],
            "revision": self._settings.revision or "",
        }
        return self._metrics.page(self._model, build, statistics)


def routes(
    observer: Observer, supervisor: Supervisor, authorised: Callable[..., str], errors: Any
) -> APIRouter:
    """The endpoints. All want an API key where there are any."""
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
    async def life(request_id: str, key: Annotated[str, Depends(authorised)]) -> schema.RequestLife:
        """What a request did when, with how many it rode, and what it waited for."""
        return await observer.life(key, request_id)

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
                self._observer.answered(route.path, status, time.monotonic() - began_s)
