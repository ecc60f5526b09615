"""File responses: whole files, ranges, or 304 if the client has the file (RFC 9110)."""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Receive, Scope, Send

from carpool.errors import FileNotFound
from carpool.server.bodies import schema

PARTS: dict[int | str, dict[str, Any]] = {
    206: {"description": "the requested `Range`"},
    304: {"description": "unchanged: `If-None-Match`, `If-Modified-Since`"},
    416: {"model": schema.Error, "description": "`Range` is beyond the end"},
}
"""Further responses of such routes, for the OpenAPI document."""

MOST_WARNINGS = 4096  # bytes of all warnings in a header

_RANGE = r"(?:[0-9]{1,18}-[0-9]{0,18}|-[0-9]{1,18})"
_RANGES = re.compile(rf"bytes=[ \t]*{_RANGE}(?:[ \t]*,[ \t]*{_RANGE})*[ \t]*", re.IGNORECASE)
_files = StaticFiles()


class Download(FileResponse):
    """A file response with ranges and validators, as players and browsers need."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.stat_result = await asyncio.to_thread(os.stat, self.path)
        except OSError as error:
            raise FileNotFound("the file was deleted meanwhile: it is no longer kept") from error
        self.set_stat_headers(self.stat_result)
        conditions = Headers(scope=scope)
        if _files.is_not_modified(self.headers, conditions):
            await NotModifiedResponse(self.headers)(scope, receive, send)
            return
        headers = MutableHeaders(raw=list(conditions.raw))
        if "range" in headers:  # Starlette answers these cases in plain text, or not at all
            validators = self.headers["last-modified"], self.headers["etag"]
            is_current = headers.get("if-range", validators[0]) in validators
            ranges = satisfiable(headers["range"], self.stat_result.st_size) if is_current else None
            del headers["range"]
            if ranges:
                headers["range"] = ranges
        await super().__call__({**scope, "headers": headers.raw}, receive, send)


def satisfiable(ranges: str, size: int) -> str | None:
    """The ranges of a `Range` header that a file can satisfy; None: ignore the header.

    Raises:
        HTTPException: 416; all ranges are beyond the end of the file.
    """
    if not _RANGES.fullmatch(ranges):
        return None
    bounds = [part.strip().split("-") for part in ranges.partition("=")[2].split(",")]
    if any(first and last and int(first) > int(last) for first, last in bounds):
        return None
    within = [
        f"{first}-{last}"
        for first, last in bounds
        if (int(first) < size if first else size and int(last))
    ]
    if not within:
        problem = f"range={ranges[:60]!r} is beyond the end"
        headers = {"content-range": f"bytes */{size}"}
        raise HTTPException(416, f"{problem}: the file has {size} bytes", headers)
    return "bytes=" + ",".join(within)


def warnings_header(warnings: Sequence[str] | None) -> dict[str, str]:
    """The warnings of a file response as a header: a JSON list in ASCII, if any fit."""
    fitting = list(warnings or [])
    while len(text := json.dumps(fitting)) > MOST_WARNINGS:
        fitting.pop()
    return {"x-warnings": text} if fitting else {}
