"""ASGI middleware around all routes: request ids, access log and metrics, body limits, HEAD."""

import re
import time
from collections.abc import Callable, Collection

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.server.error_responses import on_error
from carpool.telemetry import logs
from carpool.types import new_request_id

MOST_PATH = 200  # characters of a path that are logged
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OF_MODEL = "carpool.model"  # key of a scope: the request's model, if there are several
IS_HEAD = "carpool.head"  # key of a scope: a HEAD request
_RETRY = re.compile(r"[1-9][0-9]?")  # retry counts of OpenAI's SDKs, except 0


class HTTPMiddleware:
    """Middleware for HTTP requests; other scopes pass through."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handle if scope["type"] == "http" else self.app
        await handle(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class RequestLogging(HTTPMiddleware):
    """Adds `x-request-id` (the client's own, if valid) and the duration to every answer.

    It writes the access log, and counts the answers to work requests.

    Answers get `no-store` by default: without an `authorization` header a shared cache may keep any
    200, and a 404 such as "not ready yet", for any time (RFC 9111, 3.5 and 4.2.2). Unexpected
    exceptions become answers here: Starlette's own handler is further out, where the id is missing,
    and it raises them again.
    """

    def __init__(
        self, app: ASGIApp, count: Callable[[str, str, int, float], None] = lambda *_: None
    ) -> None:
        """Wrap an application.

        Args:
            count: called with the model, path, status and seconds of every answer to a POST.
        """
        super().__init__(app)
        self._count = count

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, began_s = Headers(scope=scope), time.monotonic()
        header = headers.get("x-request-id", "")
        request_id = header if _CLIENT_ID.fullmatch(header) else new_request_id()
        token = logs.about.set({"request_id": request_id})
        scope["request_id"] = request_id
        status = 0

        async def identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, fields = message["status"], MutableHeaders(scope=message)
                fields.append("x-request-id", request_id)
                fields["openai-processing-ms"] = str(round((time.monotonic() - began_s) * 1000))
                fields.setdefault("cache-control", "no-store")
                fields.setdefault("x-content-type-options", "nosniff")
            await send(message)

        try:
            await self.app(scope, receive, identified)
        except Exception as error:
            if status:
                status = 500
                raise
            answer = await on_error(Request(scope), error)
            await answer(scope, receive, identified)
        finally:
            status = scope.get("ended_as", status or 499)  # 499: the client disconnected first
            took_s = time.monotonic() - began_s
            if _RETRY.fullmatch(retry := headers.get("x-stainless-retry-count", "")):
                logs.about.get({})["retry"] = retry
            path = scope["raw_path"].decode("latin-1")[:MOST_PATH]  # escaped, so always one line
            logs.answered(scope["method"], path, status, took_s)
            if scope["method"] == "POST" and (route := scope.get("route")) is not None:
                self._count(scope.get(OF_MODEL, ""), route.path, status, took_s)
            logs.about.reset(token)


class BodySizeLimit(HTTPMiddleware):
    """Refuses bodies that are too large, by Content-Length before the body is read.

    Starlette's own limit answers in plain text. If a client waits for `100 Continue` and is refused
    without it, the connection is closed: the client's next bytes are unpredictable.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int, uploads: Collection[str]
    ) -> None:
        """Wrap an application.

        Args:
            uploads: paths whose bodies may have `max_upload_bytes`.
        """
        super().__init__(app)
        self._body = max_body_bytes, "--max-body-bytes"
        self._upload, self._uploads = (max_upload_bytes, "--max-upload-bytes"), uploads

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_upload = scope["path"].removeprefix(scope.get("root_path", "")) in self._uploads
        limit, flag = self._upload if is_upload else self._body
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        announced = int(length) if length.isdecimal() else 0
        is_waiting = headers.get("expect", "").lower() == "100-continue"
        received, is_answered = 0, False

        def check(size: int, text: str) -> None:
            if size > limit and not is_answered:  # after an answer, the rest is read and dropped
                raise HTTPException(413, f"the body has {text} bytes: at most {limit} ({flag})")

        async def limited() -> Message:
            nonlocal received, is_waiting
            check(announced, str(announced))
            is_waiting = False
            message = await receive()
            received += len(message.get("body", b""))
            check(received, f"more than {limit}")
            return message

        async def answered(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            if message["type"] == "http.response.start" and is_waiting:
                MutableHeaders(scope=message).append("connection", "close")
            await send(message)

        await self.app(scope, limited, answered)


class HeadRequests(HTTPMiddleware):
    """Answers HEAD as GET, without a body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        extensions = {**scope.get("extensions", {}), "http.response.pathsend": {}}  # reads no file
        whole = {**scope, "method": "GET", "headers": headers, "extensions": extensions}
        whole[IS_HEAD] = True
        await self.app(whole, receive, headed)
