"""`POST /v1/images/edits` and `/v1/images/variations`: pictures with words for what to do.

A mask means inpainting, else the model's first task that takes a picture does it. Where that
starts from the picture's own pixels, the result has the picture's size, as near as the model
can; other models follow rules of their own.
"""

import asyncio
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
from carpool.media.uploads import Mode, from_url, read_image
from carpool.parameters import Card, Task, within
from carpool.server import schema
from carpool.server.forms import (
    FILE,
    MOST_IMAGES,
    REFERENCE,
    Form,
    Sent,
    document,
    read_body,
    validated,
)
from carpool.server.images import drawing_of
from carpool.server.jobs import ACCEPTED, Office, accept_images
from carpool.server.keys import Client
from carpool.server.stream import STREAMED
from carpool.server.strict import StrictRoute
from carpool.server.studio import Studio

UPLOADS = frozenset({"/v1/images/edits", "/v1/images/variations", "/v1/videos"})
"""Paths whose bodies may be large."""
MOST_PIXELS = 32_000_000  # of an upload; a model takes less, and gets it made smaller

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
    card: Card, task: Task, form: Form, *, is_sized: bool, allow_remote: bool
) -> dict[str, Any]:
    """The pictures of a form as arguments of the pipeline, with the size that follows from them.

    Args:
        is_sized: the request itself says what size the result is to have.
        allow_remote: fetch those that are named by URL.

    Raises:
        Rejected, BodyTooLarge: one of them is not as it has to be.
    """
    if len(form.images) > (most := min(MOST_IMAGES, task.max_images)):
        seen = f"{form.name} is given {len(form.images)} times"
        raise InvalidValue(f"{seen}: {card.id} takes at most {most} for this", param=form.name)
    mode: Mode = "RGBA" if task.image_mode == "RGBA" else "RGB"
    images: list[Any] = []
    for sent in form.images:  # one by one: decoded, a picture may take 100 MB
        image = await _decoded(sent, mode, form.name, allow_remote)
        if not images:
            original = image.size
        images.append(_resized(image, within(image.size, card.max_pixels, 1)))
    arguments: dict[str, Any] = {}
    if form.mask is not None:
        mask = await _mask(form.mask, allow_remote)
        if mask.size != original:
            seen = f"mask has {_by(mask.size)} pixels, and {form.name} {_by(original)}"
            raise MaskMismatch(f"{seen}: both must have the same size", param="mask")
        arguments["mask_image"] = mask
    if _starts_from_pixels(task):
        if not is_sized:
            most_pixels = _most_pixels(card, task)
            size = within(original, most_pixels, card.size_multiple_px)
            if math.prod(size) > most_pixels:  # a side was too short, and became as it must be
                raise UnsupportedImage(
                    f"{form.name} has {_by(original)} pixels: too long for this model, whose "
                    f"sides are multiples of {card.size_multiple_px} and make at most "
                    f"{most_pixels} pixels: cut it",
                    param=form.name,
                )
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
    api = APIRouter(prefix="/v1", responses=errors, route_class=StrictRoute)

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
        sizes = body.size, form.values.get("width"), form.values.get("height")
        pictures = await pictures_of(
            served.card,
            task,
            form,
            is_sized=any(one not in (None, "auto") for one in sizes),
            allow_remote=studio.allow_remote,
        )
        digests = await asyncio.to_thread(form.digests)
        if body.background_job:
            job = await accept_images(
                office, request, client, body, pictures=pictures, digests=digests
            )
            return JSONResponse(job.model_dump(), 202)
        make = partial(drawing_of, served, body, key=client.key, pictures=pictures, kind=kind)
        return await studio.answer(request, client, {**form.values, "pictures": digests}, make)

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
