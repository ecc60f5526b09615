"""What lies around all routes: ids, limits of bodies, HEAD. The access log is `access.py`'s."""

import re
import time
from collections.abc import Collection

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.server.answers.error_responses import on_error
from carpool.telemetry import logs
from carpool.types import new_request_id

_DEFAULTS = {b"cache-control": b"no-store", b"x-content-type-options": b"nosniff"}
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Identified:
    """Gives every answer `x-request-id` (the client's own, if it is sane) and its duration.

    And what caches and browsers may do with it. An answer that says nothing itself is not stored:
    without an `authorization` header a shared cache may otherwise keep any 200, and "not ready
    yet", a 404, as long as it likes (RFC 9111, 3.5 and 4.2.2).

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
                said = list(message.get("headers", []))
                missing = _DEFAULTS.keys() - {name.lower() for name, _ in said}
                message["headers"] = [
                    *said,
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", str(took_ms).encode()),
                    *((name, _DEFAULTS[name]) for name in sorted(missing)),
                ]
            await send(message)

        try:
            await self._app(scope, receive, identified)
        except Exception as error:
            if is_answered:
                raise
            answer = await on_error(Request(scope), error)
            await answer(scope, receive, identified)


class Limited:
    """Refuses bodies that are too large: those that say so, before anything of them is read.

    Starlette's own limit answers in plain text. A client that waits for a word before it sends its
    body, and is refused without one, is hung up on: nobody could tell what it sends next.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        max_upload_bytes: int,
        uploads: Collection[str],
    ) -> None:
        """Wrap an application.

        Args:
            uploads: paths whose bodies may have `max_upload_bytes`.
        """
        self._app, self._max_body_bytes = app, max_body_bytes
        self._max_upload_bytes, self._uploads = max_upload_bytes, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most, flag = self._max_body_bytes, "--max-body-bytes"
        if scope["path"].removeprefix(scope.get("root_path", "")) in self._uploads:
            most, flag = self._max_upload_bytes, "--max-upload-bytes"
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        announced = int(length) if length.isdecimal() else 0
        is_asking = headers.get("expect", "").lower() == "100-continue"
        taken, is_answered = 0, False

        def check(size: int, seen: str) -> None:
            if size > most:
                raise HTTPException(413, f"the body has {seen} bytes: the most is {most} ({flag})")

        async def limited() -> Message:
            nonlocal taken, is_asking
            if not is_answered:  # else its end is waited for, and nothing is kept
                check(announced, str(announced))
            is_asking = False
            message = await receive()
            taken += len(message.get("body", b""))
            if not is_answered:
                check(taken, f"more than {most}")
            return message

        async def answered(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            if message["type"] == "http.response.start" and is_asking:
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        await self._app(scope, limited, answered)


class Headed:
    """Answers HEAD as GET, without a body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        extensions = {**scope.get("extensions", {}), "http.response.pathsend": {}}  # reads no file
        whole = {**scope, "method": "GET", "headers": headers, "extensions": extensions}
        await self._app(whole, receive, headed)
