"""`GET /`: the playground, a page for browsers, from files of this package.

The page asks the user for an API key and uses the public API like any client. All its files come
from this host, and its content security policy forbids other hosts.
"""

import hashlib
from functools import cache
from html import escape
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

FOLDER = files("carpool.server") / "playground"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; media-src blob:; connect-src 'self'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # browsers may cache it, but revalidate each time
}


def add_playground(app: FastAPI) -> None:
    """Add the page and its files to an application."""

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        root = str(request.scope.get("root_path", "")).rstrip("/")
        html = _content("index.html").replace(b"{{root}}", escape(root, quote=True).encode())
        return _answer(request, html, ".html")

    @app.get("/playground/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in names() or name == "index.html":
            raise HTTPException(404, "the playground has no such file: reload the page")
        return _answer(request, _content(name), name[name.rindex(".") :])


@cache
def names() -> frozenset[str]:
    """Its files."""
    return frozenset(file.name for file in FOLDER.iterdir() if file.name[-1] != "_")


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def _answer(request: Request, content: bytes, suffix: str) -> Response:
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = HEADERS | {"etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES.get(suffix, "text/plain"), headers=headers)
