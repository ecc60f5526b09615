"""The FastAPI application: routes, errors in OpenAI's shape, ids, keys, and clients that vanish."""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import carpool
from carpool.config import ServeSettings
from carpool.errors import (
    BodyTooLarge,
    Cancelled,
    CarpoolError,
    InvalidAPIKey,
    InvalidJSON,
    InvalidValue,
    MissingParameter,
    ModelNotFound,
    NoSuchEndpoint,
)
from carpool.server import schema
from carpool.server.images import Served, generate, model_entry
from carpool.supervise import Supervisor
from carpool.types import new_request_id

log = logging.getLogger("carpool")

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_bearer = HTTPBearer(auto_error=False)
T = TypeVar("T")

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Error} for status in (400, 401, 404, 413, 429, 500, 503, 504)
}


def create_app(supervisor: Supervisor, settings: ServeSettings) -> FastAPI:
    """The application in front of a supervised worker.

    The caller starts and stops the supervisor; until it is ready, requests are refused with 503.
    """
    started = int(time.time())

    def served() -> Served:
        supervisor.check_open()
        assert supervisor.ready is not None
        card = supervisor.ready.card
        return Served(settings.served_model_name or card.id, card, settings.max_n)

    def authorised(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> str:
        """The client's key as `key-1`, `key-2`, ...; nothing where none is needed."""
        if not settings.api_key:
            return ""
        given = credentials.credentials.encode("latin-1") if credentials else b""
        # every key is compared, so that the time taken says nothing about them
        known = [hmac.compare_digest(given, key.encode()) for key in settings.api_key]
        if not given or not any(known):
            raise InvalidAPIKey("the API key is missing or wrong: send 'authorization: Bearer KEY'")
        return f"key-{known.index(True) + 1}"

    api = APIRouter(prefix="/v1", dependencies=[Depends(authorised)], responses=ERRORS)

    @api.post("/images/generations")
    async def create_images(
        body: schema.ImageRequest, request: Request, key: Annotated[str, Depends(authorised)]
    ) -> schema.ImagesResponse:
        return await _unless_gone(request, generate(supervisor, served(), body, key=key))

    @api.get("/models")
    async def list_models() -> schema.Models:
        return schema.Models(data=[model_entry(served(), started)])

    @api.get("/models/{model:path}")
    async def get_model(model: str) -> schema.Model:
        known = served()
        if model != known.id:
            raise ModelNotFound(f"model {model!r} is not served here, {known.id!r} is")
        return model_entry(known, started)

    app = FastAPI(title="Carpool", version=carpool.__version__)
    app.include_router(api)

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

    @app.get("/stats", dependencies=[Depends(authorised)], responses=ERRORS)
    async def stats() -> dict[str, Any]:
        """What the engine does just now and has done so far."""
        return await supervisor.statistics()

    app.add_middleware(_Limited, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(_Identified)
    app.add_exception_handler(CarpoolError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    return app


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but give it up as soon as the client hangs up."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
            return BodyTooLarge("the body exceeds the server's limit (--max-body-bytes)")
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

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
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
