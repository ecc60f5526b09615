"""`GET /`: the playground, a page for browsers, from files of this package.

The page asks the user for an API key and uses the public API like any client. All its files come
from this host, and its content security policy forbids other hosts.
"""

from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles

FOLDER = files("carpool.server") / "playground"
_PAGE = files("carpool.server.routes") / "playground.html"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; media-src blob:; connect-src 'self'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # browsers may cache it, but revalidate each time
}


class _Files(StaticFiles):
    """The files of the page, with its headers."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def add_playground(app: FastAPI) -> None:
    """Add the page and its files to an application."""
    page_files = _Files(packages=[("carpool.server", "playground")])

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        root = str(request.scope.get("root_path", "")).rstrip("/")
        html = _PAGE.read_text().replace("{{root}}", escape(root, quote=True))
        headers = HEADERS | {"etag": f'"{sha256(html.encode()).hexdigest()}"'}
        response = Response(html, media_type="text/html", headers=headers)
        is_known = page_files.is_not_modified(response.headers, request.headers)
        return NotModifiedResponse(response.headers) if is_known else response

    app.mount("/playground", page_files)
