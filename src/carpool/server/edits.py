"""`POST /v1/images/edits` and `/v1/images/variations`: forms with pictures, which tell what to do.

A mask means inpainting, else the model's first task that takes a picture does it. Where that
starts from the picture's own pixels, the result has the picture's size, as near as the model
can; other models follow rules of their own.
"""

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from carpool.errors import (
    BodyTooLarge,
    InvalidJSON,
    InvalidValue,
    MaskMismatch,
    MissingParameter,
    ModelNotSupported,
    UnsupportedImage,
    UnsupportedParameter,
)
from carpool.media.uploads import MOST_BYTES, Mode, from_url, read_image
from carpool.parameters import Card, Task
from carpool.server import schema
from carpool.server.images import drawing_of
from carpool.server.stream import STREAMED
from carpool.server.studio import Client, Studio

UPLOADS = frozenset({"/v1/images/edits", "/v1/images/variations"})  # whose bodies may be large
MOST_IMAGES = 16  # of a request, whatever the model takes
MOST_MASK_BYTES = 4 << 20
MOST_PIXELS = 32_000_000  # of an upload; a model takes less, and gets it made smaller
MOST_FIELDS = 100

_IMAGE = re.compile(r"image(\[[0-9]{0,3}\])?")  # `image`, and what SDKs send for lists
_INNER = re.compile(r"([^\[\]]+)\[\]\[([^\[\]]+)\]")  # `lora[][id]`: of a list of objects
_BOOLEANS = {"true": True, "false": False}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: _BOOLEANS[text.lower()],
    "numbers": json.loads,
}
_KINDS = {
    **dict.fromkeys(("n", "seed", "priority", "output_compression", "partial_images"), "int"),
    **dict.fromkeys(("timeout_s", "deadline_s"), "float"),
    **dict.fromkeys(("stream", "background_job"), "bool"),
    "lora": "numbers",
}

Sent = bytes | str
"""A file, or the URL of one."""


@dataclass(slots=True)
class Form:
    """What a form said."""

    values: dict[str, Any] = field(default_factory=dict)
    images: list[Sent] = field(default_factory=list)
    mask: Sent | None = None


async def read_form(request: Request, card: Card) -> Form:
    """Read a form with pictures; its texts become what they stand for, where they can.

    Raises:
        InvalidJSON, InvalidValue, BodyTooLarge: it is no such form.
    """
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise InvalidJSON(f"the body is {kind[:60]!r}: must be a form sent as multipart/form-data")
    form, texts = Form(), list[tuple[str, str]]()
    async with request.form(
        max_files=MOST_IMAGES + 1, max_fields=MOST_FIELDS, max_part_size=2 * MOST_BYTES
    ) as parts:
        for name, value in parts.multi_items():
            sent = await _read(name, value) if isinstance(value, UploadFile) else value
            if _IMAGE.fullmatch(name):
                form.images.append(sent)
            elif name == "mask":
                if form.mask is not None:
                    raise InvalidValue("mask is given twice: say it once", param="mask")
                form.mask = sent
            elif isinstance(sent, str):
                texts.append((name, sent))
            else:
                rule = "is a file: only image and mask may be"
                raise InvalidValue(f"{name[:60]} {rule}", param=name[:60])
    form.values = _typed(texts, card)
    return form


async def _read(name: str, file: UploadFile) -> bytes:
    most = MOST_MASK_BYTES if name == "mask" else MOST_BYTES
    if (file.size or 0) > most:
        raise BodyTooLarge(f"{name} is larger than {most} bytes", param=name)
    return await file.read()


def _typed(texts: Sequence[tuple[str, str]], card: Card) -> dict[str, Any]:
    """Texts as what they stand for; those that cannot be are left for the checks to refuse."""
    kinds: dict[str, str] = {p.name: p.kind for task in card.tasks for p in task.parameters}
    kinds |= _KINDS
    values: dict[str, Any] = {}
    for key, text in texts:
        value: Any = text
        inner = _INNER.fullmatch(key)
        name = inner[1] if inner else key.removesuffix("[]")
        try:
            # of lists, an entry at a time; of objects, numbers look like numbers
            is_single = not inner and not key.endswith("[]")
            value = _PARSERS[kinds[name]](text) if is_single else json.loads(text)
        except (KeyError, ValueError, RecursionError):
            value = text
        if inner:
            entries = values.setdefault(name, [])
            if not entries or inner[2] in entries[-1]:
                entries.append({})
            entries[-1][inner[2]] = value
        elif key.endswith("[]"):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise InvalidValue(f"{name[:60]} is given twice: say it once", param=name[:60])
        else:
            values[name] = value
    return values


def task_of(card: Card, form: Form, *, is_variation: bool = False) -> Task:
    """What is to be done with the pictures of a form.

    Raises:
        MissingParameter, InvalidValue: too few pictures, or too many.
        ModelNotSupported: the model does nothing of the kind.
        UnsupportedParameter: it does, but not with a mask.
    """
    task = card.task_for(["image"])
    if not task.takes("image") or (is_variation and not _starts_from_pixels(task)):
        does = ", ".join(one.name for one in card.tasks)
        what = "vary" if is_variation else "edit"
        raise ModelNotSupported(f"{card.id} cannot {what} pictures: it does {does}", param="model")
    if form.mask is not None:
        task = card.task_for(["image", "mask_image"])
        if not task.takes("mask_image"):
            raise UnsupportedParameter(f"mask: {card.id} takes none, leave it out", param="mask")
    if not form.images:
        raise MissingParameter("image is missing: send the picture as a file", param="image")
    if len(form.images) > (most := min(MOST_IMAGES, task.max_images)):
        seen = f"image is given {len(form.images)} times"
        raise InvalidValue(f"{seen}: {card.id} takes at most {most} for this", param="image")
    return task


async def pictures_of(
    card: Card, task: Task, form: Form, *, is_sized: bool, allow_remote: bool
) -> dict[str, Any]:
    """The pictures of a form as arguments of the pipeline, with the size that follows from them.

    Args:
        is_sized: the request itself says what size the result is to have.
        allow_remote: fetch those that are named by URL.

    Raises:
        Rejected, BodyTooLarge: one of them is not as it has to be.
    """
    mode: Mode = "RGBA" if task.image_mode == "RGBA" else "RGB"
    images: list[Any] = []
    for sent in form.images:  # one by one: decoded, a picture may take 100 MB
        image = await _decoded(sent, mode, "image", allow_remote)
        if not images:
            original = image.size
        images.append(_resized(image, within(image.size, card.max_pixels, 1)))
    arguments: dict[str, Any] = {}
    if form.mask is not None:
        mask = await _mask(form.mask, allow_remote)
        if mask.size != original:
            seen = f"mask has {_by(mask.size)} pixels, and image {_by(original)}"
            raise MaskMismatch(f"{seen}: both must have the same size", param="mask")
        arguments["mask_image"] = mask
    if _starts_from_pixels(task):
        if not is_sized:
            size = within(original, card.max_pixels, card.size_multiple_px)
            images = [_resized(image, size) for image in images]
            if task.takes("width") and task.takes("height"):
                arguments |= {"width": size[0], "height": size[1]}
        elif not task.takes("width"):
            rule = "this model draws in the picture's own size, leave it out"
            raise UnsupportedParameter(f"size: {rule}", param="size")
    if "mask_image" in arguments:
        arguments["mask_image"] = _resized(arguments["mask_image"], images[0].size)
    return {**arguments, "image": images[0] if len(images) == 1 else images}


def _starts_from_pixels(task: Task) -> bool:
    return task.takes("strength")


def within(size: tuple[int, int], max_pixels: int, multiple: int) -> tuple[int, int]:
    """The largest size of about this shape, and not above it, that a model can do."""
    shrink = min(1.0, math.sqrt(max_pixels / math.prod(size)))
    width, height = (max(multiple, int(side * shrink) // multiple * multiple) for side in size)
    return width, height


def _resized(image: Any, size: tuple[int, int]) -> Any:
    return image if image.size == size else image.resize(size)


async def _decoded(sent: Sent, mode: Mode, name: str, allow_remote: bool) -> Any:
    read = {"max_pixels": MOST_PIXELS, "mode": mode, "name": name}
    if isinstance(sent, str):
        return await from_url(sent, allow_remote=allow_remote, **read)  # type: ignore[arg-type]
    return await asyncio.to_thread(partial(read_image, sent, **read))  # type: ignore[arg-type]


async def _mask(sent: Sent, allow_remote: bool) -> Any:
    """Where to draw anew, in white: OpenAI's masks are transparent there."""
    if isinstance(sent, bytes) and not sent.startswith(b"\x89PNG"):
        raise UnsupportedImage("mask cannot be read: it must be a PNG", param="mask")
    alpha = (await _decoded(sent, "RGBA", "mask", allow_remote)).getchannel("A")
    if alpha.getextrema()[0] == 255:
        rule = "what is to be drawn anew must be transparent, and nothing is"
        raise MaskMismatch(f"mask: {rule}", param="mask")
    return alpha.point(lambda value: 255 - value)


def _digests(form: Form) -> list[str]:
    """Of the pictures. Takes its time: not on the event loop."""
    sent = [*form.images, form.mask or ""]
    plain = (one.encode() if isinstance(one, str) else one for one in sent)
    return [hashlib.sha256(one).hexdigest() for one in plain]


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _validated(values: dict[str, Any]) -> schema.ImageRequest:
    try:
        body = schema.ImageRequest.model_validate(values)
    except ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(problems) from error
    if body.background_job:
        rule = "jobs have no pictures to begin with: leave it out"
        raise UnsupportedParameter(f"background_job: {rule}", param="background_job")
    return body


def _form_schema(*required: str) -> dict[str, Any]:
    """The form for the OpenAPI document."""
    fields = schema.ImageRequest.model_json_schema()["properties"]
    file = {"type": "string", "format": "binary"}
    properties = {name: rule for name, rule in fields.items() if name != "background_job"}
    properties |= {"image": {"type": "array", "items": file, "maxItems": MOST_IMAGES}}
    properties |= {"mask": {**file, "description": "PNG; transparent where to draw anew"}}
    form = {"type": "object", "required": list(required), "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def routes(studio: Studio, asking: Callable[..., Client], errors: Any) -> APIRouter:
    """The endpoints.

    Args:
        asking: dependency: who asks.
        errors: for the OpenAPI document.
    """
    api = APIRouter(prefix="/v1", responses=errors)

    async def work(
        request: Request, client: Client, kind: Literal["image_edit", "image_generation"]
    ) -> Any:
        served = studio.served()
        is_variation = kind == "image_generation"
        form = await read_form(request, served.card)
        if is_variation:
            form.values.setdefault("prompt", "")
        body = _validated(form.values)
        task = task_of(served.card, form, is_variation=is_variation)
        given = {body.size, form.values.get("width"), form.values.get("height")}
        pictures = await pictures_of(
            served.card,
            task,
            form,
            is_sized=bool(given - {None, "auto"}),
            allow_remote=studio.allow_remote,
        )
        sent = await asyncio.to_thread(_digests, form)
        make = partial(drawing_of, served, body, key=client.key, pictures=pictures, kind=kind)
        return await studio.answer(request, client, {**form.values, "pictures": sent}, make)

    @api.post(
        "/images/edits",
        response_model=schema.ImagesResponse,
        responses=STREAMED,
        openapi_extra=_form_schema("prompt", "image"),
    )
    async def edit_images(request: Request, client: Annotated[Client, Depends(asking)]) -> Any:
        """Draw a picture anew: as a prompt says, where a mask says, from one or several."""
        return await work(request, client, "image_edit")

    @api.post(
        "/images/variations",
        response_model=schema.ImagesResponse,
        responses=STREAMED,
        openapi_extra=_form_schema("image"),
    )
    async def vary_images(request: Request, client: Annotated[Client, Depends(asking)]) -> Any:
        """Draw something like a picture, without a prompt."""
        return await work(request, client, "image_generation")

    return api
