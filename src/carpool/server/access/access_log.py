"""One log line for every HTTP request, in the access log."""

import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.telemetry import logs

MOST_PATH = 200  # characters of a path that are logged
_RETRY = re.compile(rb"[1-9][0-9]?")  # as OpenAI's SDKs count them, from 0


class Accessed:
    """Writes the line when a request has ended; 499 stands for a client that was gone before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began_s = 499, time.monotonic()

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = logs.about.set({})
        try:
            await self._app(scope, receive, seen)
        except Exception:
            status = 500
            raise
        finally:
            retry = dict(scope["headers"]).get(b"x-stainless-retry-count", b"")
            if _RETRY.fullmatch(retry):
                logs.about.get({})["retry"] = retry.decode()
            path = scope["raw_path"].decode("latin-1")[:MOST_PATH]  # still escaped: one line
            status = scope.get("ended_as", status)  # of a stream
            logs.answered(scope["method"], path, status, time.monotonic() - began_s)
            logs.about.reset(token)
