"""`GET /`: the playground, a page for browsers, from files of this package.

The page asks the user for an API key and uses the public API like any client. All its files come
from this host, and its content security policy forbids other hosts.
"""

from functools import cache
from html import escape
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from carpool.server.responses.downloads import Download

FOLDER = Path(__file__).parents[1] / "playground"
TYPES = {
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
        html = (FOLDER / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(html.replace("{{root}}", escape(root, quote=True)), headers=HEADERS)

    @app.get("/playground/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in names() or name == "index.html":
            raise HTTPException(404, "the playground has no such file: reload the page")
        kind = TYPES.get(Path(name).suffix, "text/plain")
        return Download(FOLDER / name, media_type=kind, headers=HEADERS)


@cache
def names() -> frozenset[str]:
    """Its files."""
    return frozenset(file.name for file in FOLDER.iterdir() if file.name[-1] != "_")
