"""`POST /v1/images/edits` and `/v1/images/variations`: pictures with words for what to do.

A mask means inpainting, else the model's first task that takes a picture does it. Where that
starts from the picture's own pixels, the result has the picture's size, as near as the model
can; other models follow rules of their own.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from carpool.errors import (
    InvalidValue,
    MaskMismatch,
    MissingParameter,
    ModelNotSupported,
    UnsupportedImage,
    UnsupportedParameter,
)
from carpool.media.reader import Intake
from carpool.media.uploads import Mode
from carpool.request.parameters import Card, Task, check_n, within
from carpool.server.access.keys import Client
from carpool.server.answers.responder import Studio, unless_gone
from carpool.server.answers.stream import STREAMED
from carpool.server.bodies import schema
from carpool.server.bodies.forms import (
    FILE,
    MOST_IMAGES,
    REFERENCE,
    Form,
    document,
    read_body,
    validated,
)
from carpool.server.bodies.strict import WorkRoute
from carpool.server.routes.images import drawing_of
from carpool.server.routes.jobs import ACCEPTED, Office, accept_images

UPLOADS = frozenset({"/v1/images/edits", "/v1/images/variations", "/v1/videos"})
"""Paths whose bodies may be large."""

_NAMES = "image", "images"  # in a form, in JSON
_SEVERAL = {"type": "array", "maxItems": MOST_IMAGES}
_IN_FORM = {
    "image": {**_SEVERAL, "items": FILE},
    "mask": {**FILE, "description": "PNG; transparent where to draw anew"},
}
_IN_JSON = {"images": {**_SEVERAL, "items": REFERENCE}, "mask": REFERENCE}


def task_of(card: Card, form: Form, *, is_variation: bool = False) -> Task:
    """What is to be done with the pictures of a form.

    Raises:
        MissingParameter: there is no picture.
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
    return task


async def pictures_of(
    card: Card, task: Task, form: Form, intake: Intake, *, is_sized: bool
) -> dict[str, Any]:
    """The pictures of a form as arguments of the pipeline, with the size that follows from them.

    The form has none of them afterwards.

    Args:
        is_sized: the request itself says what size the result is to have.

    Raises:
        Rejected, BodyTooLarge: one of them is not as it has to be.
        RateLimited, Overloaded: there is no memory for it now.
    """
    name, sent, mask = form.name, form.images, form.mask
    form.images, form.mask = [], None
    if len(sent) > (most := min(MOST_IMAGES, task.max_images)):
        seen = f"{name} is given {len(sent)} times"
        raise InvalidValue(f"{seen}: {card.id} takes at most {most} for this", param=name)
    mode: Mode = "RGBA" if task.image_mode == "RGBA" else "RGB"
    images: list[Any] = []
    original, size = (0, 0), None
    while sent:  # one by one: decoded, a picture may take 100 MB
        picture = await intake.open(sent.pop(0), name)
        fitted = within(picture.size, card.max_pixels, 1)
        if not images:
            original = picture.size
            size = None if is_sized else _size_for(card, task, original, name)
        then = None if size is None else partial(_resized, size=size)
        images.append(await intake.decode(picture, name, mode=mode, fitted=fitted, then=then))
    arguments: dict[str, Any] = {}
    if size is not None and task.takes("width") and task.takes("height"):
        arguments |= {"width": size[0], "height": size[1]}
    if is_sized and _starts_from_pixels(task) and not task.takes("width"):
        rule = "this model draws in the picture's own size, leave it out"
        raise UnsupportedParameter(f"size: {rule}", param="size")
    if mask is not None:
        if isinstance(mask, bytes) and not mask.startswith(b"\x89PNG"):
            raise UnsupportedImage("mask cannot be read: it must be a PNG", param="mask")
        picture = await intake.open(mask, "mask")
        if picture.size != original:
            seen = f"mask has {_by(picture.size)} pixels, and {name} {_by(original)}"
            raise MaskMismatch(f"{seen}: both must have the same size", param="mask")
        then = partial(_white, size=images[0].size)
        arguments["mask_image"] = await intake.decode(picture, "mask", mode="RGBA", then=then)
    return {**arguments, "image": images[0] if len(images) == 1 else images}


def _size_for(
    card: Card, task: Task, original: tuple[int, int], name: str
) -> tuple[int, int] | None:
    """The size of a result that begins with a picture's own pixels; None for any other."""
    if not _starts_from_pixels(task):
        return None
    most_pixels = _most_pixels(card, task)
    size = within(original, most_pixels, card.size_multiple_px)
    if math.prod(size) > most_pixels:  # a side was too short, and became as it must be
        raise UnsupportedImage(
            f"{name} has {_by(original)} pixels: too long for this model, whose sides are "
            f"multiples of {card.size_multiple_px} and make at most {most_pixels} pixels: cut it",
            param=name,
        )
    return size


def _starts_from_pixels(task: Task) -> bool:
    """Does its picture become the result, in the same size? A video begins with it."""
    return task.takes("strength") or (task.makes == "videos" and task.takes("width"))


def _most_pixels(card: Card, task: Task) -> int:
    """Of a result whose size nobody said: a video's is at most what its model does by itself."""
    own = {one.name: one.default for one in task.parameters} | card.defaults
    sides = own.get("width"), own.get("height")
    if task.makes != "videos" or not all(isinstance(side, int) for side in sides):
        return card.max_pixels
    return min(card.max_pixels, math.prod(sides))  # type: ignore[arg-type]


def _resized(image: Any, size: tuple[int, int]) -> Any:
    return image if image.size == size else image.resize(size)


def _white(image: Any, size: tuple[int, int]) -> Any:
    """Where to draw anew, in white: OpenAI's masks are transparent there."""
    alpha = image.getchannel("A")
    if alpha.getextrema()[0] == 255:
        rule = "what is to be drawn anew must be transparent, and nothing is"
        raise MaskMismatch(f"mask: {rule}", param="mask")
    return _resized(alpha.point(lambda value: 255 - value), size)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def routes(
    studio: Studio, asking: Callable[..., Any], errors: Any, office: Office | None = None
) -> APIRouter:
    """The endpoints.

    Args:
        asking: dependency: who asks, a `Client`.
        errors: for the OpenAPI document.
        office: takes what is drawn in the background.
    """
    api = APIRouter(prefix="/v1", responses=errors, route_class=WorkRoute)

    async def work(
        request: Request, client: Client, kind: Literal["image_edit", "image_generation"]
    ) -> Any:
        served = (office or studio).served()  # jobs are taken even while no worker is there
        is_variation = kind == "image_generation"
        form = await read_body(request, served.card, *_NAMES, "mask")
        if is_variation:
            form.values.setdefault("prompt", "")
        body = validated(schema.ImageRequest, form.values)
        if not body.background_job:
            served = studio.served()
        task = task_of(served.card, form, is_variation=is_variation)
        n = check_n(1 if body.n is None else body.n, served.max_n)
        intake = studio.intake(request, client.owner, n)
        digests = await unless_gone(request, intake.run(form.digests))
        sizes = body.size, form.values.get("width"), form.values.get("height")
        is_sized = any(one not in (None, "auto") for one in sizes)
        reading = pictures_of(served.card, task, form, intake, is_sized=is_sized)
        pictures = await unless_gone(request, reading)
        if body.background_job:
            job = await accept_images(
                office, request, client, body, pictures=pictures, digests=digests
            )
            return JSONResponse(job.model_dump(), 202)
        make = partial(drawing_of, served, body, key=client.key, pictures=pictures, kind=kind)
        sent = {**form.values, "pictures": digests}
        return await studio.answer(request, client, lambda: sent, make, is_streamed=body.stream)

    @api.post(
        "/images/edits",
        response_model=schema.ImagesResponse,
        responses={**STREAMED, **ACCEPTED},
        openapi_extra=document(schema.ImageRequest, ["prompt", *_NAMES], _IN_FORM, _IN_JSON),
    )
    async def edit_images(request: Request, client: Annotated[Client, Depends(asking)]) -> Any:
        """Draw a picture anew: as a prompt says, where a mask says, from one or several."""
        return await work(request, client, "image_edit")

    @api.post(
        "/images/variations",
        response_model=schema.ImagesResponse,
        responses={**STREAMED, **ACCEPTED},
        openapi_extra=document(schema.ImageRequest, _NAMES, _IN_FORM, _IN_JSON),
    )
    async def vary_images(request: Request, client: Annotated[Client, Depends(asking)]) -> Any:
        """Draw something like a picture, without a prompt."""
        return await work(request, client, "image_generation")

    return api
