"""Bodies with pictures: forms, and JSON that names its pictures by URL.

The texts of a form become numbers, booleans and lists by the type of their field; texts that do not
fit stay for the checks to refuse. Browsers write null as the text `null`: it omits any field that
is not a prompt. Pictures stay as they were sent: nothing is decoded or fetched here.
"""

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from carpool import errors
from carpool.media.reader import ImageData
from carpool.media.uploads import MOST_BYTES, digest_of
from carpool.request.card import Card
from carpool.request.expand import TEXTS
from carpool.server.bodies.json_bodies import in_text, received
from carpool.server.bodies.json_pictures import (
    Nested,
    digests_of,
    parsed,
    picture_in,
    read_json,
    taken,
)  # fmt: skip

MOST_IMAGES = 16  # limit for a request of any model
MOST_MASK_BYTES = 4 << 20
MOST_FIELDS = 100
MOST_TEXT_BYTES = 1 << 20  # limit for all texts together
NULL = "null"
URLENCODED = "application/x-www-form-urlencoded"

_PART = re.compile(r"([a-z_]+)(?:\[[0-9]{0,3}\])?(?:\[(image_url|file_id)\])?")  # SDKs' spelling
_INNER = re.compile(r"([^\[\]]+)\[\]\[([^\[\]]+)\]")  # `lora[][id]`: a list of objects
_URL = re.compile(rb"data:[a-z0-9.;/+-]{0,80};base64,", re.IGNORECASE)
_INT = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def number(text: str, pattern: re.Pattern[str] = _FLOAT) -> float:
    """Parse a JSON number, or raise ValueError; Python accepts more: "1_0", any script's digits."""
    if not pattern.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no number")
    return float(text) if pattern is _FLOAT else int(text)


_PARSERS: dict[str, Callable[[str], Any]] = {  # raise ValueError or KeyError
    "int": lambda text: number(text, _INT),
    "float": number,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    **dict.fromkeys(("numbers", "list", "dict"), in_text),
}
_KINDS = {
    **dict.fromkeys(("n", "seed", "priority", "output_compression", "partial_images"), ("int",)),
    **dict.fromkeys(("timeout_s", "deadline_s", "fps", "step_cache"), ("float",)),
    **dict.fromkeys(("stream", "background_job", "return_stage_metrics"), ("bool",)),
    **dict.fromkeys(("enhance_prompt", "prompt_weights"), ("bool",)),
    "lora": ("numbers",),
}

FILE: dict[str, Any] = {"type": "string", "format": "binary"}
REFERENCE: dict[str, Any] = {
    "type": "object",
    "required": ["image_url"],
    "properties": {"image_url": {"type": "string", "description": "data:image/png;base64,..."}},
}
"""Schema of a picture in a form, and in JSON, for the OpenAPI document."""

Body = TypeVar("Body", bound=BaseModel)


@dataclass(slots=True)
class Form:
    """The values and pictures of a body."""

    values: dict[str, Any] = field(default_factory=dict)
    images: list[ImageData] = field(default_factory=list)
    mask: ImageData | None = None
    name: str = "image"  # field of the pictures, for error texts
    nested: Nested = field(default_factory=dict)  # pictures in other fields, or in nested lists
    warnings: list[str] = field(default_factory=list)  # about fields that change nothing
    is_before_white: bool = False  # transparent pixels become white; else opaque

    def digests(self) -> list[str]:
        """Digests of the pictures as they were sent. Blocks: not on the event loop."""
        pictures = [*self.images, self.mask or ""] if self.images or self.mask else []
        return [*map(digest_of, pictures), *digests_of(self.nested)]

    def add(self, name: str, picture: ImageData) -> None:
        if name != "mask":
            self.images.append(picture)
        elif self.mask is not None:
            raise errors.InvalidValue("mask is given twice: send it once", param="mask")
        else:
            self.mask = picture


CardOf = Callable[[str | None], Awaitable[Card]]


async def read_body(
    request: Request,
    card: Card,
    *names: str,
    cards: CardOf,
    takes_nested: bool = False,
) -> Form:
    """Read a form, or JSON.

    Args:
        cards: finds the card of the model that the body names.
        names: fields that may hold pictures, the usual one first.
        takes_nested: in JSON, other parameters may hold pictures too, in nested lists.

    Raises:
        InvalidJSON, InvalidValue, UnsupportedParameter, BodyTooLarge: the body is invalid.
        HTTPException: the body exceeds the limits of `json_bodies`.
        StoreFailed: no disk space for its files.
    """
    kind = request.headers.get("content-type", "").lower()
    if kind.startswith(("multipart/form-data", URLENCODED)):
        return await _read_form(request, card, names, cards)
    values = await read_json(request, instead="a form, or a JSON object")
    form = Form(values, name=names[0])
    if takes_nested:
        form.nested = taken(values, card)
    for name in names:
        value = values.pop(name, None)
        if takes_nested and isinstance(value, list) and any(isinstance(x, list) for x in value):
            form.nested["image"] = value
            continue
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None:
                form.add(name, url_of(entry, name))
    if (picture := picture_in(values)) is not None:
        problem = f"the body has a data: URL of {len(picture)} bytes where none is taken"
        raise errors.InvalidValue(f"{problem}: only {', '.join(names)} may be a picture")
    return form


async def _read_form(request: Request, card: Card, names: Sequence[str], cards: CardOf) -> Form:
    form, texts = Form(name=names[0]), list[tuple[str, str]]()
    async with _parts_of(request, card, names[0]) as parts:
        for part, value in parts:
            part = _text(part)
            match = _PART.fullmatch(part)
            name = match[1] if match and match[1] in names else ""
            if isinstance(value, UploadFile):
                if not name:
                    rule = f"is a file: only {', '.join(names)} may be"
                    raise errors.InvalidValue(f"{part[:60]} {rule}", param=part[:60])
                form.add(name, await _read(name, value))
                continue
            text = _text(value, part)
            if name and text == NULL:
                continue
            if match and name:
                form.add(name, _sent({match[2]: text} if match[2] else text, name))
            else:
                texts.append((part, text))
    if sum(len(text) for _, text in texts) > MOST_TEXT_BYTES:
        raise errors.BodyTooLarge(f"the texts of this form have more than {MOST_TEXT_BYTES} bytes")
    named = dict(texts).get("model")
    form.values = _typed(texts, await cards(None if named == NULL else named))
    return form


class _Parser(MultiPartParser):
    spool_max_size = 1 << 20  # bytes of a file kept in memory; LitServe patches it process-wide


@asynccontextmanager
async def _parts_of(
    request: Request, card: Card, name: str
) -> AsyncIterator[Iterable[tuple[str, UploadFile | str]]]:
    """The parts of a form; texts are decoded as Latin-1, see `_text`."""
    if request.headers["content-type"].lower().startswith(URLENCODED):
        body = await received(request)
        work = partial(urlencoded, body)
        yield await request.app.state.server.parse_json(request, work, len(body))
        return
    kind = request.headers["content-type"] + "; charset=latin-1"
    parser = _Parser(
        Headers({"content-type": kind}), request.stream(), max_files=MOST_IMAGES + 1,
        max_fields=MOST_FIELDS, max_part_size=2 * MOST_BYTES,
    )  # fmt: skip
    try:
        parts = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            limit = min(MOST_IMAGES, card.task_for(["image"]).max_images)
            problem = f"{name} is given more than {MOST_IMAGES} times"
            raise errors.InvalidValue(
                f"{problem}: {card.id} takes at most {limit}", param=name
            ) from error
        if error.message.startswith("Too many fields"):
            raise errors.InvalidValue(f"the form has more than {MOST_FIELDS} texts") from error
        raise errors.InvalidJSON(f"the body is not a form: {error.message}") from error
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else type(error).__name__
        raise errors.StoreFailed(
            f"the server has no room for uploads just now ({cause})"
        ) from error
    try:
        yield parts.multi_items()
    finally:
        await parts.close()


def urlencoded(body: bytes | bytearray) -> list[tuple[str, str]]:
    """The texts of a form without files, as `application/x-www-form-urlencoded`.

    Pictures are base64, where only a few letters are escaped: `bytes.replace` decodes them fast.
    Other escapes take the slow parser, Starlette's for all: 1.9 GB for a picture of 14 MiB.

    Raises:
        InvalidJSON: not such a form, or too many fields.
        BodyTooLarge: a text with other escapes is too long.
    """
    if not body:
        raise errors.InvalidJSON("the body is empty: send a form, or a JSON object")
    if body.count(b"&") >= MOST_FIELDS:
        raise errors.InvalidValue(f"the form has more than {MOST_FIELDS} texts")
    texts = []
    for pair in bytes(body).split(b"&"):
        name, equals, value = pair.partition(b"=")
        if not equals:
            raise errors.InvalidJSON("the body is not a form: write each field as NAME=VALUE")
        is_bare = not (b"%2B" in value or b"%2b" in value)  # base64 letters without escapes
        value = value.replace(b"+", b" ")
        for letter in b"+/=:;,\r\n\t":
            value = value.replace(b"%%%02X" % letter, bytes([letter]))
            value = value.replace(b"%%%02x" % letter, bytes([letter]))
        if is_bare and _URL.match(value):
            value = value.replace(b" ", b"+")
        if len(value) > MOST_TEXT_BYTES and b"%" in value:
            raise errors.BodyTooLarge(f"a text of this form has more than {MOST_TEXT_BYTES} bytes")
        name, value = unquote_to_bytes(name.replace(b"+", b" ")), unquote_to_bytes(value)
        texts.append((name.decode("latin-1"), value.decode("latin-1")))
    return texts


def _sent(value: Any, name: str) -> ImageData:
    """The URL of a picture; the text may be a URL or a JSON reference."""
    if isinstance(value, str) and value.startswith("{"):
        value = parsed(bytearray(value.encode()))
    return url_of(value, name)


def _text(part: str, name: str = "a name") -> str:
    if part.isascii():  # a picture may be long
        return part
    try:
        return part.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise errors.InvalidValue(f"{name[:60]} in this form is not UTF-8: send it so") from error


async def _read(name: str, file: UploadFile) -> bytes:
    limit = MOST_MASK_BYTES if name == "mask" else MOST_BYTES
    if (file.size or 0) > limit:
        raise errors.BodyTooLarge(f"{name} has {file.size} bytes: the limit is {limit}", param=name)
    return await file.read()


def url_of(value: Any, name: str) -> ImageData:
    """The URL of a picture, given as {"image_url": ...} or plain."""
    fields = {key: v for key, v in value.items() if v} if isinstance(value, dict) else {}
    if "file_id" in fields:
        rule = "files are not kept here: send the picture itself, or its image_url"
        raise errors.UnsupportedParameter(f"{name}.file_id: {rule}", param=name)
    url = fields["image_url"] if fields.keys() == {"image_url"} else value
    if not isinstance(url, str | memoryview):
        raise errors.InvalidValue.of(
            name, value, 'must be {"image_url": "data:image/png;base64,..."}'
        )
    return url


def _typed(texts: Sequence[tuple[str, str]], card: Card) -> dict[str, Any]:
    """Convert texts to the types of their fields; a text that does not fit stays as it is."""
    parameters = {p.name: (p.kind, *p.also) for task in card.tasks for p in task.parameters}
    kinds: dict[str, tuple[str, ...]] = {**parameters, **_KINDS}
    values: dict[str, Any] = {}
    forms: dict[str, str] = {}  # key: name; value: its brackets as written
    for key, text in texts:
        value: Any = text
        inner = _INNER.fullmatch(key)
        name = inner[1] if inner else key.removesuffix("[]")
        is_text = TEXTS.fullmatch(name) is not None or "str" in kinds.get(name, ())[:1]
        if text == NULL and not is_text and not key.endswith("[]"):
            continue
        # each entry of a list is a field; a prompt "7" stays text
        is_entry = bool(inner) or key.endswith("[]")
        for kind in () if is_text else ("list",) if is_entry else kinds.get(name, ()):
            with suppress(KeyError, ValueError):
                value = _PARSERS[kind](text)
                break
        form = "object" if inner else "list" if key.endswith("[]") else "single"
        if forms.setdefault(name, form) != form or (form == "single" and name in values):
            raise errors.InvalidValue(f"{name[:60]} is given twice: send it once", param=name[:60])
        if inner:
            entries = values.setdefault(name, [])
            if not entries or inner[2] in entries[-1]:
                entries.append({})
            entries[-1][inner[2]] = value
        elif key.endswith("[]"):
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    return values


def validated(model: type[Body], values: Any) -> Body:
    """Validate values as a body; raises RequestValidationError, as FastAPI does."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(problems) from error


def json_document(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI schema of a JSON body that its route reads itself."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def document(
    model: type[BaseModel],
    required: Sequence[str],
    in_form: dict[str, Any],
    in_json: dict[str, Any],
) -> dict[str, Any]:
    """OpenAPI schema of a body that may be a form or JSON, which differ in pictures.

    Args:
        model: all fields but the pictures.
        required: names of required fields; one format may lack some of them.
    """
    schema = model.model_json_schema()
    if not schema["properties"].keys() >= set(required):
        schema.pop("examples")  # examples without pictures
    content = {}
    for kind, pictures in (("multipart/form-data", in_form), ("application/json", in_json)):
        fields = schema["properties"] | pictures
        names = [name for name in required if name in fields]
        content[kind] = {"schema": schema | {"properties": fields, "required": names}}
    return {"requestBody": {"required": True, "content": content}}
