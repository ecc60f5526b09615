"""Files over HTTP: whole, in part, or not again where the client has them (RFC 9110)."""

import asyncio
import os
import re
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Receive, Scope, Send

from carpool.errors import FileNotFound
from carpool.server.bodies import schema

PARTS: dict[int | str, dict[str, Any]] = {
    206: {"description": "the part that `Range` names"},
    304: {"description": "the client has it: `If-None-Match`, `If-Modified-Since`"},
    416: {"model": schema.Error, "description": "`Range` lies behind the end"},
}
"""For the OpenAPI document: how else such routes answer."""

_ONE = r"(?:[0-9]{1,18}-[0-9]{0,18}|-[0-9]{1,18})"
_RANGES = re.compile(rf"bytes=[ \t]*{_ONE}(?:[ \t]*,[ \t]*{_ONE})*[ \t]*", re.IGNORECASE)
_files = StaticFiles()


class Download(FileResponse):
    """A file, with all that players and browsers ask of one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.stat_result = await asyncio.to_thread(os.stat, self.path)
        except OSError as error:
            raise FileNotFound("the file has just been removed") from error
        self.set_stat_headers(self.stat_result)
        if _files.is_not_modified(self.headers, Headers(scope=scope)):
            await NotModifiedResponse(self.headers)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        """The parts that are asked for: first bytes, and those behind the last; none for all of it.

        Raises:
            HTTPException: 416; no part has a byte in it.
        """
        if not _RANGES.fullmatch(http_range):
            return []
        asked = [one.strip() for one in http_range.partition("=")[2].split(",")]
        parts = [one.split("-") for one in asked]
        if any(first and last and int(first) > int(last) for first, last in parts):
            return []
        within = [
            f"{first}-{last}"
            for first, last in parts
            if (int(first) < file_size if first else file_size and int(last))
        ]
        if not within:
            seen = f"range={http_range[:60]!r} lies behind the end"
            headers = {"content-range": f"bytes */{file_size}"}
            raise HTTPException(416, f"{seen}: the file has {file_size} bytes", headers)
        return super()._parse_range_header("bytes=" + ",".join(within), file_size)
