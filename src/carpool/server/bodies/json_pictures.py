"""Pictures in JSON bodies: at any depth, as URLs or as bare base64.

Large pictures are cut out before the rest is parsed; then they are put back in place.

Some are parameters of their own (ControlNet, IP-Adapter): `{"control_image": "data:..."}`. Clients
nest lists as the pipeline takes them: `{"ip_adapter_image": [[{"image_url": ...}], ...]}`.
`input_images` reads the edited picture and its mask, except in nested lists, as several ControlNets
take them: those are read here.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from fastapi import Request

from carpool.errors import InvalidJSON, InvalidValue
from carpool.media.reader import ImageData, ImageIntake
from carpool.media.uploads import Mode, digest_of
from carpool.request.card import Card
from carpool.request.images import MASKS, PICTURES
from carpool.request.sizes import within
from carpool.server.bodies.json_bodies import check_is_json, cut, parse, received

NAMES = tuple(name for name in (*PICTURES, *MASKS) if name not in ("image", "mask_image"))
MOST_PICTURES = 64  # pictures of a request
_NO_URL = b"data:image/png;base64,"  # the kind is read from the file itself

Nested = dict[str, Any]
"""Pictures by parameter, as they were sent; or nested lists of pictures."""


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


def taken(values: dict[str, Any], card: Card) -> Nested:
    """Remove from a body, and return, the pictures for parameters of the model's tasks."""
    names = [name for name in NAMES if any(task.takes(name) for task in card.tasks)]
    return {name: values.pop(name) for name in names if values.get(name) is not None}


def pictures_in(value: Any) -> Iterator[Any]:
    """Yield the entries of nested lists, in order."""
    if isinstance(value, list):
        for entry in value:
            yield from pictures_in(entry)
    else:
        yield value


def check_count(nested: Mapping[str, Any]) -> None:
    """Refuse more pictures than a request may have."""
    if (count := sum(1 for _ in pictures_in([*nested.values()]))) > MOST_PICTURES:
        first = next(iter(nested))
        rule = f"must be at most {MOST_PICTURES}"
        raise InvalidValue(f"{', '.join(nested)} have {count} pictures: {rule}", param=first)


def digests_of(nested: Mapping[str, Any]) -> list[str]:
    """Digests of the sent pictures, each with its parameter and list position. Slow."""

    def label(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(label, value))}]"
        return digest_of(value if isinstance(value, (str, memoryview)) else repr(value))

    return [f"{name}:{label(nested[name])}" for name in sorted(nested)]


async def decoded(
    nested: Mapping[str, Any], card: Card, intake: ImageIntake, url: Any
) -> dict[str, Any]:
    """Decode the pictures into pipeline arguments, in the same nested lists.

    Args:
        url: returns the URL of a picture reference; its name is for errors.

    Raises:
        Rejected, BodyTooLarge: a picture breaks a rule.
    """

    async def read(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [await read(name, entry) for entry in value]
        mode: Mode = "L" if name in MASKS else "RGB"
        picture = await intake.open(url(value, name), name)
        fitted = within(picture.size, card.max_pixels, 1)
        return await intake.decode(picture, name, mode=mode, fitted=fitted)

    return {name: await read(name, value) for name, value in nested.items()}
