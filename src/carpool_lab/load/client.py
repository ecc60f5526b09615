"""The HTTP client of `carpool bench`: requests pictures or videos from an OpenAI-compatible server.

`LoadClient.ask` sends one request and returns after the complete answer, or raises `RequestError`.
It never retries: the refusals of an overloaded server are part of the result.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from carpool.errors import CarpoolError, LibraryMissing

try:
    import httpx2
except ImportError as error:
    message = "the load client needs httpx2: pip install httpx2"
    raise LibraryMissing(message) from error

BenchTask = Literal["text-to-image", "text-to-video"]

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class RequestError(Exception):
    """A request without a picture or video; equal failures have equal `reason`s."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class LoadClient:
    """Sends requests to one server; use it as `async with LoadClient(...) as client`.

    Args:
        url: URL of the server, with or without `/v1`.
        api_key: sent as a bearer token.
        timeout_s: limit for each answer.

    Raises:
        CarpoolError: not a valid URL.
    """

    def __init__(self, url: str, task: BenchTask, *, api_key: str, timeout_s: float) -> None:
        try:
            base = httpx2.URL(url.rstrip("/").removesuffix("/v1"))
        except httpx2.InvalidURL as error:
            raise CarpoolError(f"{url!r} is no URL: {error}") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise CarpoolError(f"{url!r} is no URL of a server: write http://HOST:PORT")
        self._ask = self._picture if task == "text-to-image" else self._video
        self._timeout_s = timeout_s
        self._http = httpx2.AsyncClient(
            base_url=base,
            headers={"authorization": f"Bearer {api_key}"},
            timeout=None,  # `ask` has a total timeout
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=base.host not in _LOOPBACK,  # proxy settings
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the picture or video; returns the server's JSON.

        Raises:
            RequestError: the request failed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(body)
        except TimeoutError:
            rule = f"no answer within {self._timeout_s:g} s (--timeout)"
            raise RequestError("timeout", rule) from None
        except httpx2.RequestError as error:
            reason = f"connection: {type(error).__name__}"
            raise RequestError(reason, str(error) or repr(error)) from None

    async def statistics(self) -> dict[str, Any]:
        """The server's `/stats`; empty if it has none."""
        try:
            async with asyncio.timeout(10):
                answer = await self._http.get("/stats")
            data = answer.json() if answer.is_success else {}
        except (httpx2.RequestError, TimeoutError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    async def _picture(self, body: Mapping[str, Any]) -> dict[str, Any]:
        data = _json_of(await self._http.post("/v1/images/generations", json=body))
        pictures = data.get("data")
        if not pictures or not all(
            picture.get("b64_json") or picture.get("url") for picture in pictures
        ):
            raise RequestError("no picture", "the answer holds no picture")
        return data

    async def _video(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job by a form, as OpenAI's client; poll until it is done; download its file.

        It ignores the server's poll interval, which would distort the latency: polling every 2 %
        of the elapsed time adds at most 2 %.
        """
        began_s = asyncio.get_running_loop().time()
        form = {name: (None, _as_field(value)) for name, value in body.items()}
        job = _json_of(await self._http.post("/v1/videos", files=form))
        if "id" not in job:
            raise RequestError("no video", "the answer names no job")
        while job.get("status") in ("queued", "in_progress"):
            waited_s = asyncio.get_running_loop().time() - began_s
            await asyncio.sleep(min(max(0.02 * waited_s, 0.02), 2.0))
            job = _json_of(await self._http.get(f"/v1/videos/{job['id']}"))
        if job.get("status") != "completed":
            error = job.get("error") or {}
            code = error.get("code") or job.get("status")
            raise RequestError(f"video failed: {code}", str(error.get("message") or job))
        content = await self._http.get(f"/v1/videos/{job['id']}/content")
        if content.is_error:
            _json_of(content)
        if not content.content:
            raise RequestError("no video", "the answer holds no video")
        return job


def _json_of(answer: httpx2.Response) -> dict[str, Any]:
    """The JSON object of an answer."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.is_success and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):  # not in OpenAI's format
        error = {"code": answer.reason_phrase, "message": answer.text[:200]}
    code = error.get("code") or error.get("type") or answer.reason_phrase
    raise RequestError(f"{answer.status_code} {code}", str(error.get("message", "")))


def _as_field(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
