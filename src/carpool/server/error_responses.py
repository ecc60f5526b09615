"""Map exceptions to HTTP responses in OpenAI's format."""

import asyncio
import json
import logging
import re
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from carpool import errors
from carpool.errors import CarpoolError, InvalidJSON, in_full, nearest, show
from carpool.telemetry import logs

log = logging.getLogger("carpool")

METHODS = ("GET", "HEAD", "POST", "DELETE")  # all methods of all paths
_SEE = ": see /openapi.json"
_NO_PATH = f"no such path{_SEE}"
_BY_STATUS: dict[int, tuple[type[CarpoolError], str]] = {  # "": the exception's own message
    404: (errors.NoSuchEndpoint, _NO_PATH),
    405: (errors.MethodNotAllowed, ""),
    413: (errors.BodyTooLarge, ""),
    415: (errors.UnsupportedMediaType, ""),
    416: (errors.RangeNotSatisfiable, ""),
}


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Make the response for any exception."""
    api_error = _api_error(error)
    if api_error.message == _NO_PATH:
        document = await asyncio.to_thread(request.app.openapi)  # made once
        paths = ["/docs", "/openapi.json", *document["paths"]]
        api_error = errors.NoSuchEndpoint(f"no such path{nearest(request.url.path, paths)}{_SEE}")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(api_error, errors.MethodNotAllowed):
        headers = {"allow": (methods := ", ".join(_allowed(request)))}
        api_error = errors.MethodNotAllowed(f"{request.method} is not supported: use {methods}")
    elif isinstance(api_error, errors.InvalidAPIKey):
        headers = {"www-authenticate": "Bearer"}
    elif api_error.status >= 429:
        headers = {"x-should-retry": "true" if api_error.should_retry else "false"}
    if api_error.retry_after_s is not None:
        headers["retry-after-ms"] = str(round(api_error.retry_after_s * 1000))
        headers["retry-after"] = str(max(1, round(api_error.retry_after_s)))
    logs.refused(api_error)
    if api_error.status >= 500 and api_error.__cause__ is not None:
        log.error("a request failed: %s", in_full(api_error))
    return _ErrorResponse({"error": api_error.body}, status_code=api_error.status, headers=headers)


class _ErrorResponse(JSONResponse):
    """JSON that accepts lone surrogates: a message may quote a client's "\\ud800"."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def _allowed(request: Request) -> list[str]:
    """The methods of a path. Each is a separate route; the framework names only the first."""

    def has(method: str) -> bool:
        scope = {**request.scope, "method": "GET" if method == "HEAD" else method}
        return any(route.matches(scope)[0] == Match.FULL for route in request.app.routes)

    return [method for method in METHODS if has(method)]


def _api_error(error: Exception) -> CarpoolError:
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error.__cause__, CarpoolError):  # raised while the framework read the body
        return error.__cause__
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors()[0])
    if isinstance(error, ClientDisconnect) or isinstance(error.__cause__, ClientDisconnect):
        return errors.Cancelled("the client closed the connection before its request was whole")
    if isinstance(error, HTTPException):
        kind, message = _BY_STATUS.get(error.status_code, (InvalidJSON, ""))
        return kind(message or str(error.detail))
    log.error("a request failed unexpectedly", exc_info=error)
    return CarpoolError("the server failed; its log says more")


def _invalid(problem: Any) -> CarpoolError:
    """Map a pydantic error to an API error."""
    name, is_missing = ".".join(map(str, problem["loc"][1:])), problem["type"] == "missing"
    if is_missing and not name:
        return InvalidJSON("the body is empty: send a JSON object")
    if problem["type"] == "json_invalid" or not name:
        text = "the body is not a JSON object sent as application/json"
        return InvalidJSON(f"{text}: {problem['msg']}")
    if is_missing:
        return errors.MissingParameter(f"{name} is missing: every request needs one", param=name)
    if problem["type"] == "extra_forbidden":
        return errors.UnknownParameter(f"{name[:60]} is unknown here: leave it out", param=name)
    rule = re.sub(r"^\w+ should ", "must ", problem["msg"])
    return errors.InvalidValue(f"{name}={show(problem['input'])}: {rule}", param=name)
