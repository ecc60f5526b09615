"""The FastAPI application: its routes and middleware."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import carpool
from carpool.config import ServeSettings
from carpool.errors import CarpoolError
from carpool.fleet.fleet import Fleet
from carpool.jobs.runner import Runner
from carpool.server.access.cross_origin import AllowedHosts, CrossOriginProtection
from carpool.server.access.keys import Keyring
from carpool.server.compat import dialects
from carpool.server.error_responses import on_error
from carpool.server.routes import artifacts, images, jobs, observe, videos
from carpool.server.routes.docs_page import add_docs
from carpool.server.routes.playground import add_playground
from carpool.server.state import AppState
from carpool.server.transport.middleware import BodySizeLimit, HeadRequests, RequestLogging
from carpool.telemetry.tracing import Tracing

UPLOADS = frozenset({"/v1/images/edits", "/v1/images/variations", "/v1/videos", "/v1/meshes"})
"""Paths of forms with pictures: their bodies may be large."""
LARGE_BODY_PATHS = UPLOADS | {"/v1/videos/sync"} | dialects.LARGE_BODY_PATHS


def create_app(
    fleet: Fleet,
    settings: ServeSettings,
    runner: Runner,
    *,
    keys: Keyring | None = None,
    traces: Tracing | None = None,
) -> FastAPI:
    """Make the application over a fleet of workers.

    The caller starts and stops the fleet and the runner; until the fleet is ready, requests are
    refused with 503.

    Args:
        keys: keys of the settings, if the caller wants to reload them.
        traces: writes a span for each work request.
    """
    # a redirect would be sent before authentication, and would repeat any Host
    app = FastAPI(
        title="Carpool",
        version=carpool.__version__,
        docs_url=None,  # `docs_page` needs no CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    # deprecated as an argument; uvicorn's expects a proxy that strips the prefix
    app.root_path = f"/{path}" if (path := settings.root_path.strip("/")) else ""
    state = app.state.server = AppState(fleet, settings, runner, keys, traces, dialects.translated)
    for router in (
        images.router, images.links, jobs.router, videos.router, artifacts.router, observe.router,
        observe.public, *dialects.ROUTERS,
    ):  # fmt: skip
        app.include_router(router)
    add_docs(app)
    if settings.playground:
        add_playground(app)
    app.add_middleware(HeadRequests)  # the last one is the outermost
    app.add_middleware(
        BodySizeLimit,
        max_body_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_upload_bytes,
        uploads=LARGE_BODY_PATHS,
    )
    app.add_middleware(
        CrossOriginProtection, hosts=AllowedHosts.of(settings), is_keyless=not settings.has_keys
    )
    app.add_middleware(RequestLogging, count=state.observer.answered)
    for error in (CarpoolError, RequestValidationError, HTTPException):
        app.add_exception_handler(error, on_error)
    return app
