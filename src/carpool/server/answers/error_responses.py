"""Exceptions as answers in the shape that OpenAI's clients expect."""

import logging
import re
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from carpool.errors import (
    BodyTooLarge,
    Cancelled,
    CarpoolError,
    InvalidAPIKey,
    InvalidJSON,
    InvalidValue,
    MethodNotAllowed,
    MissingParameter,
    NoSuchEndpoint,
    RangeNotSatisfiable,
    UnsupportedMediaType,
    in_full,
    show,
)

log = logging.getLogger("carpool")

METHODS = ("GET", "HEAD", "POST", "DELETE")  # that any path has


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Any exception as an answer."""
    told = _told(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(told, MethodNotAllowed):
        headers = {"allow": ", ".join(_allowed(request))}
    elif isinstance(told, InvalidAPIKey):
        headers = {"www-authenticate": "Bearer"}
    elif told.status >= 429:
        headers = {"x-should-retry": "true" if told.should_retry else "false"}
    if told.retry_after_s is not None:
        headers["retry-after-ms"] = str(round(told.retry_after_s * 1000))
        headers["retry-after"] = str(max(1, round(told.retry_after_s)))
    if told.status >= 500 and told.__cause__ is not None:
        log.error("a request failed: %s", in_full(told))
    return JSONResponse({"error": told.body}, status_code=told.status, headers=headers)


def _allowed(request: Request) -> list[str]:
    """The methods of a path. Each is a route of its own, and the framework names the first."""

    def has(method: str) -> bool:
        scope = {**request.scope, "method": "GET" if method == "HEAD" else method}
        return any(route.matches(scope)[0] == Match.FULL for route in request.app.routes)

    return [method for method in METHODS if has(method)]


def _told(error: Exception) -> CarpoolError:
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error.__cause__, CarpoolError):  # as the framework read the body
        return error.__cause__
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors()[0])
    if isinstance(error, ClientDisconnect) or isinstance(error.__cause__, ClientDisconnect):
        return Cancelled("the client closed the connection before its request was whole")
    if isinstance(error, HTTPException):
        if error.status_code == 413:
            return BodyTooLarge(error.detail)
        if error.status_code == 415:
            return UnsupportedMediaType(error.detail)
        if error.status_code == 416:
            return RangeNotSatisfiable(error.detail)
        if error.status_code == 404:
            return NoSuchEndpoint("no such path: see /openapi.json")
        if error.status_code == 405:
            return MethodNotAllowed("this path has other methods, see `allow` and /openapi.json")
        return InvalidJSON(str(error.detail))
    log.error("a request failed unexpectedly", exc_info=error)
    return CarpoolError("the server failed; its log says more")


def _invalid(problem: Any) -> CarpoolError:
    """What pydantic found wrong, in our words."""
    name = ".".join(str(part) for part in problem["loc"][1:])
    if problem["type"] == "missing" and not name:
        return InvalidJSON("the body is empty: send a JSON object")
    if problem["type"] == "json_invalid" or not name:
        return InvalidJSON(
            f"the body is not a JSON object sent as application/json: {problem['msg']}"
        )
    if problem["type"] == "missing":
        return MissingParameter(f"{name} is missing: every request needs one", param=name)
    rule = re.sub(r"^\w+ should ", "must ", problem["msg"])
    return InvalidValue(f"{name}={show(problem['input'])}: {rule}", param=name)
