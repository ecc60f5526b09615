"""Bodies read for whom they are due, and so that they mean one thing: no key twice, no great depth.

RFC 8259 leaves open which of two equal keys counts, and parsers differ: what one of them checked
another one runs. NaN and Infinity, which are no JSON, are let through to `carpool.parameters`: it
refuses them by the name of the parameter.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

MOST_DEPTH = 32  # of lists and objects inside each other
MOST_KEY = 200  # characters: keys are repeated in errors
_SENT = (
    "JSON, sent as application/json (curl: -H 'content-type: application/json'), or a form with "
    "pictures, sent as multipart/form-data"
)
_JSON = re.compile(r"application/([a-z0-9.!#$&^_-]+\+)?json\s*(;.*)?", re.IGNORECASE)


class StrictRoute(APIRoute):
    """A route whose JSON body is read by `read`: the `route_class` of an `APIRouter`.

    Before anything of it is read, `state.authorise` of the application is asked.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            await request.app.state.authorise(request)
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class _StrictRequest(Request):
    async def body(self) -> bytes:
        """The body, if it is called JSON: other kinds a web page may send without asking."""
        kind = self.headers.get("content-type", "").strip()
        if kind and not _JSON.fullmatch(kind):
            raise HTTPException(415, f"the body is {kind[:60]!a}: it must be {_SENT}")
        body = await super().body()
        if body and not kind:
            raise HTTPException(415, f"the body has no content-type: it must be {_SENT}")
        return body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = read(await self.body())
        return self._json


def read(body: bytes) -> Any:
    """Parse a body.

    Raises:
        HTTPException: 400; says what is wrong with it.
    """
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise HTTPException(400, "the body is not JSON: it is not UTF-8") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise HTTPException(400, f"the body is not JSON: {error.msg} ({where})") from error
    except RecursionError:
        raise _deep() from None
    except ValueError as error:
        raise HTTPException(400, "the body has a number of too many digits") from error
    level: list[Any] = [[value]]
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return value
    raise _deep()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its pairs; refuses a key that stands there twice, or is endless."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise HTTPException(400, f"the body says {twice[:40]!a} twice: say it once")
    if any(len(key) > MOST_KEY for key in found):
        raise HTTPException(400, f"the body has a key of more than {MOST_KEY} characters")
    return found


def _deep() -> HTTPException:
    return HTTPException(400, f"the body nests lists or objects more than {MOST_DEPTH} deep")
