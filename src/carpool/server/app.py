"""The FastAPI application: routes, errors in OpenAI's shape, ids, keys, and clients that vanish."""

import logging
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import carpool
from carpool import logs
from carpool.config import ServeSettings
from carpool.errors import (
    BodyTooLarge,
    CarpoolError,
    InvalidAPIKey,
    InvalidJSON,
    InvalidValue,
    MissingParameter,
    ModelNotFound,
    NoSuchEndpoint,
)
from carpool.jobs.runner import Runner
from carpool.server import edits, jobs, schema, videos
from carpool.server.access import Accessed
from carpool.server.files import Files
from carpool.server.files import routes as files_at
from carpool.server.idempotency import Answers
from carpool.server.images import Served, drawing_of, model_entry
from carpool.server.jobs import Office
from carpool.server.keys import Keyring
from carpool.server.limits import Limits, Place
from carpool.server.observe import Observed, Observer, routes
from carpool.server.stream import STREAMED
from carpool.server.strict import StrictRoute
from carpool.server.studio import Client, Studio
from carpool.supervise import Supervisor
from carpool.tracing import Tracing
from carpool.types import new_request_id

log = logging.getLogger("carpool")

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_bearer = HTTPBearer(auto_error=False)

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Error} for status in (400, 401, 404, 413, 422, 429, 500, 503, 504)
}


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
    answers: Answers[schema.ImagesResponse] = Answers(_bytes_of, time.monotonic)
    limits = Limits(settings.requests_per_minute, settings.max_in_flight_per_key, time.monotonic)
    started, observer = int(time.time()), Observer(supervisor, settings, runner)

    def served() -> Served:
        supervisor.check_open()
        return described()

    def described() -> Served:
        assert supervisor.ready is not None
        card = supervisor.ready.card
        name = settings.served_model_name or card.id
        return Served(name, card, settings.max_n, settings.metadata, settings.metadata_prompt)

    def authorised(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> str:
        """The name of the client's key; nothing where none is needed."""
        name = keyring.name_of(credentials.credentials.encode("latin-1") if credentials else b"")
        if name:
            logs.about.get({})["key"] = name
        return name

    async def working(
        request: Request, key: Annotated[str, Depends(authorised)]
    ) -> AsyncIterator[None]:
        """Holds every request for work against its key's limits, and traces it."""
        if request.method != "POST":
            yield
            return
        async with limits.hold(key) as request.state.place:
            with spans.request(request.headers, request.scope["request_id"]):
                yield

    def awaited() -> Served:
        """For jobs: they can wait for the next worker."""
        if supervisor.state != "worker_lost":
            supervisor.check_open()
        return described()

    def owner(key: Annotated[str, Depends(authorised)]) -> str:
        """Whose jobs a client sees."""
        return keyring.owner(key)

    def asking(
        key: Annotated[str, Depends(authorised)], whose: Annotated[str, Depends(owner)]
    ) -> Client:
        return Client(key, whose)

    async def check_room(request: Request, client: Client) -> None:
        """Refuse work that the worker would refuse, or that is too much beside a client's jobs."""
        supervisor.check_room()
        place: Place = request.state.place
        if runner is not None and place.most is not None:
            place.check(sum((await runner.count_open(client.owner)).values()))

    files = Files(runner.store.folder / "links" if runner else None)
    remote = settings.allow_remote_media
    studio = Studio(supervisor, observer, answers, files, served, check_room, allow_remote=remote)
    office = Office(runner, awaited, owner, settings.max_frames, remote) if runner else None
    api = APIRouter(
        prefix="/v1",
        dependencies=[Depends(working)],
        responses=ERRORS,
        route_class=StrictRoute,
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
            job = await jobs.accept_images(office, request, client.owner, body, client.key)
            return JSONResponse(job.model_dump(), 202)
        sent = body.model_dump(exclude_unset=True)
        make = partial(drawing_of, served(), body, key=client.key)
        return await studio.answer(request, client, sent, make)

    @api.get("/models")
    async def list_models() -> schema.Models:
        return schema.Models(data=[model_entry(served(), started)])

    @api.get("/models/{model:path}")
    async def get_model(model: str) -> schema.Model:
        known = served()
        if model != known.id:
            raise ModelNotFound(f"model {model[:60]!r} is not served here, {known.id!r} is")
        return model_entry(known, started)

    root_path = f"/{path}" if (path := settings.root_path.strip("/")) else ""
    app = FastAPI(title="Carpool", version=carpool.__version__, root_path=root_path)
    app.include_router(api)
    drawn = edits.routes(studio, asking, ERRORS, office)
    app.include_router(drawn, dependencies=[Depends(working)])
    app.include_router(files_at(files, ERRORS))
    if office is not None:
        app.include_router(jobs.routes(office, ERRORS))
        app.include_router(videos.routes(office, ERRORS), dependencies=[Depends(working)])
    app.include_router(routes(observer, supervisor, authorised, owner, ERRORS))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"model": schema.Health}})
    async def health(response: Response) -> schema.Health:
        """200 when a request would be accepted now."""
        response.status_code = 200 if supervisor.state == "ready" else 503
        return schema.Health(status=supervisor.state)

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """The HTTP process turns; says nothing about the model."""
        return {"status": "alive"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        ready = supervisor.ready
        return {"carpool": carpool.__version__, **(ready.versions if ready else {})}

    app.add_middleware(
        _Limited,
        max_body_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_upload_bytes,
    )
    app.add_middleware(_Identified)
    app.add_middleware(Observed, observer=observer)
    app.add_middleware(Accessed)
    app.add_exception_handler(CarpoolError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    return app


def _bytes_of(answer: schema.ImagesResponse) -> int:
    return sum(len(image.b64_json or image.url or "") for image in answer.data)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    """Any exception as OpenAI's clients expect it."""
    told = _told(error)
    if isinstance(told, InvalidAPIKey):
        headers = {"www-authenticate": "Bearer"}
    elif told.status >= 429:
        headers = {"x-should-retry": "true" if told.should_retry else "false"}
    else:
        headers = {}
    if told.retry_after_s is not None:
        headers["retry-after-ms"] = str(round(told.retry_after_s * 1000))
        headers["retry-after"] = str(max(1, round(told.retry_after_s)))
    body = {"message": told.message, "type": told.type, "param": told.param, "code": told.code}
    return JSONResponse({"error": body}, status_code=told.status, headers=headers)


def _told(error: Exception) -> CarpoolError:
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors()[0])
    if isinstance(error, HTTPException):
        if error.status_code == 413:
            return BodyTooLarge(
                "the body exceeds the server's limit (--max-body-bytes, --max-upload-bytes)"
            )
        if error.status_code in (404, 405):
            return NoSuchEndpoint("no such path, or not with this method: see /openapi.json")
        return InvalidJSON(str(error.detail))
    log.error("a request failed unexpectedly", exc_info=error)
    return CarpoolError("the server failed; its log says more")


def _invalid(problem: Any) -> CarpoolError:
    """What pydantic found wrong, in our words."""
    name = ".".join(str(part) for part in problem["loc"][1:])
    if problem["type"] == "json_invalid" or not name:
        return InvalidJSON(
            f"the body is not a JSON object sent as application/json: {problem['msg']}"
        )
    if problem["type"] == "missing":
        return MissingParameter(f"{name} is missing: every request needs one", param=name)
    seen = repr(problem["input"])
    seen = seen if len(seen) <= 60 else seen[:57] + "..."
    rule = re.sub(r"^\w+ should ", "must ", problem["msg"])
    return InvalidValue(f"{name}={seen}: {rule}", param=name)


class _Limited:
    """Refuses bodies that are too large. Starlette's own limit answers in plain text."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken, most = 0, self._max_body_bytes
        if scope.get("path", "").removeprefix(scope.get("root_path", "")) in edits.UPLOADS:
            most = self._max_upload_bytes

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > most:
                raise HTTPException(413)
            return message

        await self._app(scope, limited, send)


class _Identified:
    """Gives every answer `x-request-id` (the client's own, if it is sane) and its duration.

    Also turns exceptions that nobody foresaw into answers: Starlette's own place for that lies
    further out, where they would lack the id, and it would raise them again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _CLIENT_ID.fullmatch(given) else new_request_id()
        scope["request_id"] = logs.about.get({})["request_id"] = request_id

        is_answered = False

        async def identified(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                took_ms = round((time.monotonic() - began_s) * 1000)
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", str(took_ms).encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, identified)
        except Exception as error:
            if is_answered:
                raise
            answer = await _on_error(Request(scope), error)
            await answer(scope, receive, identified)
