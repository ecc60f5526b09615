"""From a body to checked requests: load its model, read its pictures, check its parameters.

A route makes one of these calls. API key and limits were checked before the body was read. The
parameters of pictures are checked last (`ParsedImageRequest.requests`): after the server has room
for the request, and only if its `Idempotency-Key` has no stored answer.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

from carpool.media.reader import ImageIntake
from carpool.request.card import Card
from carpool.server.bodies import forms, schema
from carpool.server.bodies.input_images import edit_images, edit_task
from carpool.server.bodies.json_pictures import check_count, decoded, taken
from carpool.server.image_request import ParsedImageRequest
from carpool.server.state import AuthenticatedRequest, Needs, ServedModel

MakeMask = Callable[[ImageIntake, Any], Awaitable[tuple[Any, Any]]]
"""Makes a mask (white: redraw) for a picture; returns the mask and the initial picture."""


async def read_form(
    context: AuthenticatedRequest, needs: Needs, *names: str, takes_nested: bool = False
) -> forms.Form:
    """Read a form, or JSON, and translate its field names to this API's.

    Args, Raises: as `AppState.any_loaded_model`, `forms.read_body` and `AppState.translate`.
    """
    state = context.state
    card = (await state.any_loaded_model(needs)).card
    form = await forms.read_body(
        context.request, card, *names, cards=state.card_of, takes_nested=takes_nested
    )
    named = form.values.get("model")
    card = await state.card_of(named) if isinstance(named, str) else card
    form.values = state.translate(form.values, card)
    return form


def translated(context: AuthenticatedRequest, body: forms.Body, card: Card) -> forms.Body:
    """A body with the field names of other servers translated to this API's."""
    fields = body.model_dump(exclude_unset=True)
    values = context.state.translate(fields, card)
    return body if values == fields else forms.validated(type(body), values)


async def parse_image_request(
    context: AuthenticatedRequest,
    body: schema.ImageRequest,
    form: forms.Form | None = None,
    task: Literal["edit", "variation"] | None = None,
    *,
    model: ServedModel | None = None,
    size: tuple[int, int] | None = None,
    mask: MakeMask | None = None,
) -> ParsedImageRequest:
    """Load the model that a body names, and read its pictures.

    Args:
        form: has the pictures; None: the body's own fields may hold pictures, under other servers'
            names.
        task: the task for the picture; None: an edit if there is a picture.
        model: the body's model, if it is already loaded.
        size: width and height to which the first picture is resized.
        mask: makes the mask of the picture, if there is one.

    Raises:
        CarpoolError: the model or a picture cannot be used.
    """
    needs: Needs = "restarting" if body.background_job else "ready"
    model = await context.model_of(body, needs, model)
    if form is None:
        body = translated(context, body, model.card)
        form = forms.Form(nested=taken(body.model_extra or {}, model.card))
    image_request = ParsedImageRequest(model, body, context.client, warnings=form.warnings)
    if not (task or form.images or form.nested):
        return image_request
    check_count(form.nested)
    intake = context.intake(image_request.outputs)
    image_request.digests = await context.unless_disconnected(intake.run(form.digests))
    reading = decoded(form.nested, model.card, intake, forms.url_of)
    image_request.pictures = await context.unless_disconnected(reading)
    if task or form.images:
        image_request.kind = "image_generation" if task == "variation" else "image_edit"
        if "image" not in image_request.pictures:
            await context.unless_disconnected(_read(image_request, form, intake, size, mask))
    return image_request


async def _read(
    image_request: ParsedImageRequest,
    form: forms.Form,
    intake: ImageIntake,
    size: tuple[int, int] | None,
    mask: MakeMask | None,
) -> None:
    """Read the pictures to be redrawn; resize the first one, and make its mask."""
    card, is_variation = image_request.model.card, image_request.kind == "image_generation"
    task = edit_task(card, form, is_variation=is_variation, has_mask=mask is not None)
    pictures = image_request.pictures
    pictures |= await edit_images(card, task, form, image_request.body, intake)
    image = pictures["image"]
    first, *rest = image if isinstance(image, list) else [image]
    if size is not None and first.size != size:
        first = await intake.run(partial(first.resize, size))
    if mask is not None:
        pictures["mask_image"], first = await mask(intake, first)
    pictures["image"] = [first, *rest] if rest else first
