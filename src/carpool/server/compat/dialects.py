"""All dialects: their routers, and the translation of other servers' fields.

A dialect is a module or folder with routers. No other module of the server imports dialects.
"""

from fastapi import APIRouter

from carpool.server.compat import huggingface
from carpool.server.compat.automatic1111 import routes as automatic1111
from carpool.server.compat.chat import routes as chat
from carpool.server.compat.peers import adapters
from carpool.server.compat.peers import routes as peers
from carpool.server.compat.peers.fields import translated

__all__ = ["LARGE_BODY_PATHS", "ROUTERS", "translated"]

ROUTERS: tuple[APIRouter, ...] = (
    chat.router, huggingface.router, automatic1111.router, automatic1111.lists, peers.router,
    adapters.router,
)  # fmt: skip
LARGE_BODY_PATHS = frozenset({"/", "/sdapi/v1/img2img", "/v1/chat/completions"})
"""Paths that accept pictures in the body."""
