"""The FastAPI application: what is served, to whom, and from what. `layers.py` lies around it."""

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import Receive

import carpool
from carpool.config import ServeSettings
from carpool.errors import CarpoolError, ModelNotFound
from carpool.jobs.runner import Runner
from carpool.media.executors import FairExecutor
from carpool.media.reader import PictureReader
from carpool.server.access.access_log import Accessed
from carpool.server.access.cross_origin import AllowedHosts, CrossOriginProtection, is_keyless
from carpool.server.access.idempotency import Answers
from carpool.server.access.keys import Client, Keyring
from carpool.server.access.limits import Limits, Place
from carpool.server.answers.error_responses import on_error
from carpool.server.answers.responder import Answer, Studio
from carpool.server.answers.signed_links import Files
from carpool.server.answers.signed_links import routes as files_at
from carpool.server.answers.stream import STREAMED
from carpool.server.bodies import schema
from carpool.server.bodies.memory import MemoryBudget
from carpool.server.bodies.strict import WorkRoute
from carpool.server.routes import edits, jobs, videos
from carpool.server.routes.docs_page import add_docs
from carpool.server.routes.images import Served, drawing_of, model_entry
from carpool.server.routes.jobs import Office
from carpool.server.routes.observe import Observed, Observer, routes
from carpool.server.transport.middleware import Headed, Identified, Limited
from carpool.telemetry import logs
from carpool.telemetry.tracing import Tracing
from carpool.worker.supervisor import Supervisor

PARSED_AT_ONCE = 64 << 10  # bytes of JSON; more is parsed on a thread

_bearer = HTTPBearer(auto_error=False)

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Error}
    for status in (400, 401, 403, 404, 405, 413, 415, 422, 429, 500, 503, 504)
}
DENIED: dict[int | str, dict[str, Any]] = {403: ERRORS[403]}
"""What any path may answer, by the host or origin that asks."""


def create_app(
    supervisor: Supervisor,
    settings: ServeSettings,
    runner: Runner | None = None,
    *,
    keys: Keyring | None = None,
    traces: Tracing | None = None,
) -> FastAPI:
    """The application in front of a supervised worker.

    The caller starts and stops the supervisor; until it is ready, requests are refused with 503.
    The same holds for the runner, without which there are no jobs.

    Args:
        keys: those of the settings, if the caller wants to read them again.
        traces: writes a span for every request for work.
    """
    keyring = keys or Keyring(settings.api_key, settings.api_key_file)
    spans = traces or Tracing()
    answers: Answers[Answer] = Answers(_bytes_of, time.monotonic)
    limits = Limits(settings.requests_per_minute, settings.max_in_flight_per_key, time.monotonic)
    memory = MemoryBudget(settings.max_in_flight_bytes, settings.max_upload_bytes)
    parser = FairExecutor("carpool-json", 4, per_tenant=1, rests=True)
    threads = max(2, os.cpu_count() or 2)
    has_keys = bool(settings.api_key or settings.api_key_file)
    encoder = FairExecutor("carpool-encode", threads, per_tenant=threads - has_keys)
    started, observer = int(time.time()), Observer(supervisor, settings, runner)

    def served() -> Served:
        supervisor.check_open()
        return described()

    def described() -> Served:
        assert supervisor.ready is not None
        card = supervisor.ready.card
        name = settings.served_model_name or card.id
        most = min(settings.max_n, settings.max_running + settings.max_queue)
        return Served(name, card, most, settings.metadata, settings.metadata_prompt)

    async def asking(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Client:
        """Whose key was sent."""
        client = keyring.client_of(
            credentials.credentials.encode("latin-1") if credentials else b""
        )
        if client.key:
            logs.about.get({})["key"] = client.key
        return client

    async def authorised(client: Annotated[Client, Depends(asking)]) -> str:
        """The name of the client's key; nothing where none is needed."""
        return client.key

    @asynccontextmanager
    async def admit(request: Request, receive: Receive, is_work: bool) -> AsyncIterator[Receive]:
        """Holds a request against the limits of its key, before any of its body is read.

        Args:
            is_work: do requests like it count?

        Returns:
            What its body is to be received by.
        """
        client = await asking(await _bearer(request))
        key, request.state.tenant = client.key, client.owner
        async with AsyncExitStack() as stack:
            if is_work:
                request.state.place = await stack.enter_async_context(limits.hold(key))
            request.state.held = stack.enter_context(memory.open(key))
            yield request.state.held.metered(receive)

    async def parse(request: Request, work: Callable[[], Any], size: int) -> Any:
        """Parse a body, on a thread if it is large."""
        if size <= PARSED_AT_ONCE:
            return work()
        return await parser.run(request.state.tenant, work)

    async def traced(
        request: Request, key: Annotated[str, Depends(authorised)]
    ) -> AsyncIterator[None]:
        """Traces every request for work."""
        if request.method != "POST":
            yield
            return
        with spans.request(request.headers, request.scope["request_id"]):
            yield

    def known() -> Served:
        """For what may be asked of a model whose worker is away."""
        if supervisor.ready is None:
            supervisor.check_open()
        return described()

    def awaited() -> Served:
        """For jobs: they can wait for the next worker."""
        if supervisor.state != "worker_lost":
            supervisor.check_open()
        return described()

    async def owner(client: Annotated[Client, Depends(asking)]) -> str:
        """Whose jobs a client sees."""
        return client.owner

    async def check_room(request: Request, client: Client) -> None:
        """Refuse work that the worker would refuse, or that is too much beside a client's jobs."""
        supervisor.check_room()
        place: Place = request.state.place
        if runner is not None and place.most is not None:
            place.check(sum((await runner.count_open(client.owner)).values()))

    folder, clock = (runner.store.folder / "links", runner.store.clock) if runner else (None, None)
    files = Files(folder, clock=clock)
    reader = PictureReader(allow_remote=settings.allow_remote_media)
    studio = Studio(supervisor, observer, answers, files, served, check_room, reader, encoder)
    office = Office(runner, awaited, owner, asking, settings.max_frames, reader) if runner else None
    api = APIRouter(
        prefix="/v1",
        dependencies=[Depends(traced)],
        responses=ERRORS,
        route_class=WorkRoute,
    )

    @api.post(
        "/images/generations",
        response_model=schema.ImagesResponse,
        responses={**STREAMED, **jobs.ACCEPTED},
    )
    async def create_images(
        body: schema.ImageRequest,
        request: Request,
        client: Annotated[Client, Depends(asking)],
    ) -> Any:
        if body.background_job:
            job = await jobs.accept_images(office, request, client, body)
            return JSONResponse(job.model_dump(), 202)
        sent = partial(body.model_dump, exclude_unset=True)
        make = partial(drawing_of, served(), body, key=client.key)
        return await studio.answer(request, client, sent, make, is_streamed=body.stream)

    @api.get("/models")
    async def list_models() -> schema.Models:
        return schema.Models(data=[model_entry(known(), started)])

    @api.get("/models/{model:path}")
    async def get_model(model: str) -> schema.Model:
        ours = known()
        if model != ours.id:
            raise ModelNotFound(f"model {model[:60]!r} is not served here, {ours.id!r} is")
        return model_entry(ours, started)

    # a redirect would be answered before any key is asked, and name whatever Host was sent
    app = FastAPI(
        title="Carpool",
        version=carpool.__version__,
        docs_url=None,  # `docs_page` needs no CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    # as an argument it is deprecated; uvicorn's would want a proxy that cuts it off
    app.root_path = f"/{path}" if (path := settings.root_path.strip("/")) else ""
    app.state.admit, app.state.parse = admit, parse
    app.include_router(api)
    drawn = edits.routes(studio, asking, ERRORS, office)
    app.include_router(drawn, dependencies=[Depends(traced)])
    app.include_router(files_at(files, ERRORS))
    if office is not None:
        app.include_router(jobs.routes(office, ERRORS))
        app.include_router(videos.routes(office, ERRORS), dependencies=[Depends(traced)])
    app.include_router(routes(observer, supervisor, authorised, owner, ERRORS))

    @app.get("/health", responses={**DENIED, 503: {"model": schema.Health}})
    async def health(response: Response) -> schema.Health:
        """200 when a request would be accepted now."""
        response.status_code = 200 if supervisor.state == "ready" else 503
        return schema.Health(status=supervisor.state)

    @app.get("/livez", responses=DENIED)
    async def livez() -> dict[str, str]:
        """The HTTP process turns; says nothing about the model."""
        return {"status": "alive"}

    @app.get("/version", responses=DENIED)
    async def version() -> dict[str, str]:
        ready = supervisor.ready
        return {"carpool": carpool.__version__, **(ready.versions if ready else {})}

    add_docs(app)
    app.add_middleware(Headed)
    app.add_middleware(
        Limited,
        max_body_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_upload_bytes,
        uploads=edits.UPLOADS,
    )
    app.add_middleware(
        CrossOriginProtection,
        hosts=AllowedHosts.of(settings),
        allows_origins=not is_keyless(settings),
    )
    app.add_middleware(Identified)
    app.add_middleware(Observed, observer=observer)
    app.add_middleware(Accessed)
    app.add_exception_handler(CarpoolError, on_error)
    app.add_exception_handler(RequestValidationError, on_error)
    app.add_exception_handler(HTTPException, on_error)
    return app


def _bytes_of(answer: Answer) -> int:
    if isinstance(answer, list):
        return sum(map(len, answer))
    return sum(len(image.b64_json or image.url or "") for image in answer.data)
