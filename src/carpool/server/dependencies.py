"""FastAPI dependencies and route classes: authenticate before the body is read."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.types import Receive, Scope, Send

from carpool.errors import InvalidValue, UnknownParameter, nearest
from carpool.server.bodies.json_bodies import check_is_json, read
from carpool.server.state import AppState, AuthenticatedRequest

_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": _ERROR}
    for status in (400, 401, 403, 404, 405, 413, 415, 422, 429, 500, 503, 504)
}
"""Error responses of paths under `/v1`, for the OpenAPI document. References: FastAPI would build
validators for each model of each route, 700 here. `responses.downloads.PARTS` adds the model."""
FORBIDDEN: dict[int | str, dict[str, Any]] = {403: ERRORS[403]}
"""The same for paths without a key: refused by `Host` or `Origin`."""


async def server_state(request: Request) -> AppState:
    return request.app.state.server  # type: ignore[no-any-return]


class _RequestContext(HTTPBearer):
    """Returns the context of a request; the route has checked its key before.

    As a security scheme it makes the OpenAPI document show that paths need a key.
    """

    async def __call__(self, request: Request) -> AuthenticatedRequest:  # type: ignore[override]
        return AuthenticatedRequest(request.app.state.server, request, request.state.client)


request_context = _RequestContext(scheme_name="HTTPBearer")

ServerState = Annotated[AppState, Depends(server_state)]
Context = Annotated[AuthenticatedRequest, Depends(request_context)]
"""The parameter of routes of class `AuthenticatedRoute`."""


async def trace_span(context: Context) -> AsyncIterator[None]:
    """Write a span for each work request."""
    request = context.request
    if request.method != "POST":
        yield
        return
    with context.state.tracing.request(request.headers, request.scope["request_id"]):
        yield


class AuthenticatedRoute(APIRoute):
    """A route that needs an API key if the server has keys."""

    is_work = False  # its POSTs count against the request limits

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # 405
            return
        request, is_work = Request(scope), self.is_work and scope["method"] == "POST"
        async with scope["app"].state.server.admit(request, receive, is_work=is_work) as admitted:
            await super().handle(scope, admitted, send)

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()
        parts = (self.dependant, *self.dependant.dependencies)
        names = [parameter.alias for part in parts for parameter in part.query_params]

        async def handle_strictly(request: Request) -> Response:
            _check_query(request, names)
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class WorkRoute(AuthenticatedRoute):
    """A route whose POSTs are work requests: limited and traced."""

    is_work = True


def router_of(route: type[AuthenticatedRoute], prefix: str = "") -> APIRouter:
    """A router for routes of one class."""
    before = Depends(trace_span if route.is_work else request_context)
    return APIRouter(prefix=prefix, route_class=route, responses=ERRORS, dependencies=[before])


def _check_query(request: Request, names: Sequence[str]) -> None:
    """Refuse unknown and repeated query parameters: the framework ignores them."""
    sent = [name for name, _ in request.query_params.multi_items()]
    for name in dict.fromkeys(sent):
        if name not in names:
            problem = f"this path takes no query parameter {name[:60]!r}"
            raise UnknownParameter(f"{problem}{nearest(name, names)}", param=name[:60])
        if sent.count(name) > 1:
            raise InvalidValue(f"{name} is given twice: send it once", param=name)


class _StrictRequest(Request):
    async def body(self) -> bytes:
        check_is_json(self.headers)
        return await super().body()

    async def json(self) -> Any:
        body = await self.body()
        return await self.app.state.server.parse_json(self, partial(read, body), len(body))
