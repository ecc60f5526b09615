"""JSON bodies with pictures at any depth, as URLs or as bare base64.

`forms.py` reads bodies with pictures in fields of their own. Here too, large pictures are cut out
before the rest is parsed; then they are put back in place.
"""

from functools import partial
from typing import Any

from fastapi import Request

from carpool.errors import InvalidJSON, InvalidValue
from carpool.media.reader import ImageData
from carpool.server.bodies.json_bodies import check_is_json, cut, parse, received

_NO_URL = b"data:image/png;base64,"  # the kind is read from the file itself


async def read_json(
    request: Request, *, takes_base64: bool = False, instead: str = "a JSON object"
) -> dict[str, Any]:
    """Read a JSON object; long pictures in it are memoryviews.

    Args:
        takes_base64: accept bare base64 as a picture.
        instead: accepted kinds of body, for the error of an empty one.

    Raises:
        InvalidJSON: the body is not an object.
        HTTPException: the body exceeds the limits of `json_bodies`.
    """
    check_is_json(request.headers)
    body = await received(request)
    if not body:
        raise InvalidJSON(f"the body is empty: send {instead}")
    work = partial(parsed, body, takes_base64)
    value = await request.app.state.server.parse_json(request, work, len(body))
    if not isinstance(value, dict):
        raise InvalidJSON(f"the body is not a JSON object: send {instead}")
    return value


def parsed(body: bytearray, takes_base64: bool = False) -> Any:
    """Parse JSON; long pictures become memoryviews."""
    text, pictures = cut(body, takes_base64=takes_base64)
    value = parse(text, has_places=not pictures)
    return _with(value, pictures) if pictures else value


def _with(value: Any, pictures: dict[str, memoryview]) -> Any:
    """Replace each placeholder by its picture."""
    if isinstance(value, dict):
        return {name: _with(entry, pictures) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with(entry, pictures) for entry in value]
    return pictures.get(value, value) if isinstance(value, str) else value


def as_url(picture: Any, name: str) -> ImageData:
    """A picture as a URL; bare base64 becomes a `data:` URL.

    Raises:
        InvalidValue: the picture is not a text.
    """
    if not isinstance(picture, str | memoryview):
        rule = "must be a picture: base64, or data:image/png;base64,..."
        raise InvalidValue.of(name, picture, rule)
    start = picture[:8] if isinstance(picture, str) else bytes(picture[:8]).decode("latin-1")
    if ":" in start:
        return picture
    if isinstance(picture, str):
        return _NO_URL.decode() + picture
    return memoryview(_NO_URL + picture)


def without_pictures(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values; raise InvalidValue if any value is a picture."""
    for name, value in values.items():
        if picture_in(value) is not None:
            raise InvalidValue(f"{name[:60]} takes no picture: leave it out", param=name[:60])
    return values


def picture_in(value: Any) -> memoryview | None:
    """Find a long picture anywhere in a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    pictures = [value] if isinstance(value, memoryview) else map(picture_in, inner)
    return next((picture for picture in pictures if picture is not None), None)
