"""Routes that ask whose a request is, and whether it may come, before they read any of its body."""

from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from carpool.server.bodies.json_bodies import check_is_json, read


class StrictRoute(APIRoute):
    """The `route_class` of routers whose clients need a key.

    `state.admit` of the application is entered around the whole request, its answer included.
    """

    is_work = False  # do its POSTs count as requests for work?

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # 405
            return
        is_work = self.is_work and scope["method"] == "POST"
        async with scope["app"].state.admit(Request(scope), receive, is_work) as admitted:
            await super().handle(scope, admitted, send)

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class WorkRoute(StrictRoute):
    """A route for requests for work: they count against the limits of their key."""

    is_work = True


class _StrictRequest(Request):
    async def body(self) -> bytes:
        check_is_json(self.headers)
        return await super().body()

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await self.app.state.parse(self, partial(read, body), len(body))
        return self._json
