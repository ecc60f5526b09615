"""Draw what a body asks for: read the pictures that it starts from, run its requests, answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from carpool.media.reader import Intake, Sent
from carpool.request.card import Card
from carpool.server.answers.generation import ImageGeneration, Kind
from carpool.server.answers.respond import respond, unless_disconnected
from carpool.server.answers.stream import EventStream
from carpool.server.bodies import peers, schema
from carpool.server.bodies.forms import Form, url_of
from carpool.server.bodies.input_images import edit_images, edit_task
from carpool.server.bodies.named_pictures import Nested, check_count, decoded, digests_of
from carpool.server.requests import image_requests, outputs_of
from carpool.server.state import AppState, AuthenticatedRequest, ServedModel

MakeMask = Callable[[Intake, Any], Any]
"""Makes a mask, white where to draw anew, for the picture that it belongs to; awaitable."""


async def translated(state: AppState, values: dict[str, Any], card: Card) -> dict[str, Any]:
    """The fields of a form under the names that they have here (`peers.translated`).

    Args:
        card: of the model that is meant where the form names none.
    """
    name = values.get("model")
    of_named = await state.card_of(name) if isinstance(name, str) else None
    return peers.translated(values, of_named or card)


async def draw(
    context: AuthenticatedRequest,
    model: ServedModel,
    body: schema.ImageRequest,
    images: Sequence[Sent] = (),
    *,
    name: str = "image",
    size: tuple[int, int] | None = None,
    mask: MakeMask | None = None,
    event: Callable[..., bytes] | None = None,
    **fields: Any,
) -> schema.ImagesResponse | EventStream:
    """Run a request for as long as its client is connected.

    Args:
        images: that it starts from.
        name: of the field with the pictures, for messages.
        size: width and height that the first picture is made to have before it is drawn anew.
        mask: of the picture, if there is one.
        event: writes a stream's events; see `ImageGeneration`.
        fields: what else tells this request from another with the same `Idempotency-Key`.

    Raises:
        CarpoolError: whatever is wrong with the request, or became of it.
    """
    context.with_headers(body)
    if not images:
        return await draw_from(context, model, body, "image_generation", event=event, **fields)
    form = Form(images=list(images), name=name)
    pictures, digests = await read_pictures(context, model, body, form, has_mask=mask is not None)
    request, intake = context.request, context.intake(outputs_of(model, body))
    first = pictures["image"][0] if isinstance(pictures["image"], list) else pictures["image"]
    if size is not None and first.size != size:
        resizing = intake.run(partial(first.resize, size))
        pictures["image"] = first = await unless_disconnected(request, resizing)
    if mask is not None:
        pictures["mask_image"] = await unless_disconnected(request, mask(intake, first))
    return await draw_from(
        context, model, body, "image_edit", pictures, digests, event=event, **fields
    )


async def read_pictures(
    context: AuthenticatedRequest,
    model: ServedModel,
    body: schema.ImageRequest,
    form: Form,
    *,
    is_variation: bool = False,
    has_mask: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """The pictures of a form as the pipeline's arguments, and their digests as they were sent.

    Args, Raises: as `edit_task` and `edit_images`.
    """
    task = edit_task(model.card, form, is_variation=is_variation, has_mask=has_mask)
    intake = context.intake(outputs_of(model, body))
    digests = await unless_disconnected(context.request, intake.run(form.digests))
    reading = edit_images(model.card, task, form, body, intake)
    return await unless_disconnected(context.request, reading), digests


async def read_nested(
    context: AuthenticatedRequest, model: ServedModel, body: schema.ImageRequest, nested: Nested
) -> tuple[dict[str, Any], list[str]]:
    """As `read_pictures`, of those that are parameters of their own."""
    if not nested:
        return {}, []
    check_count(nested)
    intake = context.intake(outputs_of(model, body))
    told = await unless_disconnected(context.request, digests_of(nested, intake))
    reading = decoded(nested, model.card, intake, url_of)
    return await unless_disconnected(context.request, reading), told


def sent_as(body: schema.ImageRequest, digests: Sequence[str], **fields: Any) -> dict[str, Any]:
    """What a client sent: with the same `Idempotency-Key` it must be the same."""
    said = body.model_dump(exclude_unset=True) | fields
    return said | ({"pictures": list(digests)} if digests else {})


async def draw_from(
    context: AuthenticatedRequest,
    model: ServedModel,
    body: schema.ImageRequest,
    kind: Kind,
    pictures: Mapping[str, Any] | None = None,
    digests: Sequence[str] = (),
    *,
    event: Callable[..., bytes] | None = None,
    **fields: Any,
) -> schema.ImagesResponse | EventStream:
    """Run a request whose pictures are read; the arguments are as for `draw`."""

    def generation() -> ImageGeneration:
        made = image_requests(model, body, key=context.client.key, pictures=pictures)
        return ImageGeneration(model, body, made, kind, event=event)

    sent = partial(sent_as, body, digests, **fields)
    return await respond(context, sent, generation, is_streamed=body.stream)
