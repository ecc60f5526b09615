"""Pictures behind links: kept in memory for an hour, for whoever has the link.

A link is signed, so that it needs no API key and ends when it says. The secret is the process's
own: after a restart no link works, but nothing is behind them any more either.
"""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Response

from carpool.errors import FileNotFound
from carpool.types import Clock

TTL_S = 3600
MOST_BYTES = 256 << 20  # of all files; the oldest go first


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    expires_s: int  # Unix time


class Files:
    """Keeps files for a while. Belongs to the event loop."""

    def __init__(self, *, clock: Clock = time.time, most_bytes: int = MOST_BYTES) -> None:
        self._clock, self._most_bytes = clock, most_bytes
        self._secret = secrets.token_bytes(32)
        self._files: OrderedDict[str, File] = OrderedDict()
        self._bytes = 0

    def keep(self, content: bytes, media_type: str) -> str:
        """Keep a file; gives the path of its link."""
        file = File(content, media_type, int(self._clock()) + TTL_S)
        file_id = f"file-{secrets.token_hex(12)}"
        self._files[file_id] = file
        self._bytes += len(content)
        while self._files and (self._bytes > self._most_bytes or self._is_oldest_over()):
            _, gone = self._files.popitem(last=False)
            self._bytes -= len(gone.content)
        signed = self._signature(file_id, file.expires_s)
        return f"/v1/files/{file_id}?expires={file.expires_s}&signature={signed}"

    def get(self, file_id: str, expires: str, signature: str) -> File:
        """The file behind a link.

        Raises:
            FileNotFound: the link is not one of ours, or has expired, or the file had to go.
        """
        file = self._files.get(file_id)
        if file is not None and file.expires_s > self._clock():
            right = self._signature(file_id, file.expires_s)
            is_ours = hmac.compare_digest(signature.encode(), right.encode())
            if is_ours and expires == str(file.expires_s):
                return file
        raise FileNotFound("no file is behind this link: links end after an hour, or a restart")

    def __len__(self) -> int:
        return len(self._files)

    def _is_oldest_over(self) -> bool:
        return next(iter(self._files.values())).expires_s <= self._clock()

    def _signature(self, file_id: str, expires_s: int) -> str:
        said = f"{file_id} {expires_s}".encode()
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()


def routes(files: Files, errors: Any) -> APIRouter:
    """Where links lead. No API key is asked for: browsers that show a picture have none."""
    api = APIRouter(responses=errors)

    @api.get("/v1/files/{file_id}", response_class=Response)
    async def get_file(file_id: str, expires: str = "", signature: str = "") -> Response:
        """A picture that was asked for with `response_format` "url"."""
        file = files.get(file_id, expires, signature)
        headers = {"cache-control": "private, max-age=3600", "x-content-type-options": "nosniff"}
        return Response(file.content, media_type=file.media_type, headers=headers)

    return api
