"""`/sdapi/v1`: the AUTOMATIC1111 API, as Open WebUI, SillyTavern and plug-ins of Krita use it.

Those clients send keys as passwords: these paths accept `authorization: Basic` with the key as the
password, except from web pages, where a browser adds it by itself.
"""

import asyncio
import base64
import contextlib
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from carpool.errors import CarpoolError, InvalidValue, SizeRejected, show
from carpool.media.masks import filled, fitted
from carpool.media.reader import ImageIntake
from carpool.media.uploads import Mode
from carpool.request.adapter_names import name_for_tag
from carpool.request.card import Card
from carpool.request.sizes import within
from carpool.request.values import is_int
from carpool.server.bodies import schema
from carpool.server.bodies.forms import Form, json_document, validated
from carpool.server.bodies.json_pictures import as_url, read_json, without_pictures
from carpool.server.compat.automatic1111 import bodies, fields
from carpool.server.dependencies import AuthenticatedRoute, Context, WorkRoute, router_of
from carpool.server.requests import MakeMask, parse_image_request
from carpool.server.responses.respond import respond
from carpool.server.responses.stage_metrics import PATIENCE_S
from carpool.server.state import AppState, AuthenticatedRequest, ServedModel

_RUNNING: WeakKeyDictionary[AppState, dict[str, dict[asyncio.Task[Any], str]]] = WeakKeyDictionary()
EMPTY_LISTS: dict[str, Any] = {
    "upscalers": [], "latent-upscale-modes": [], "sd-vae": [], "prompt-styles": [],
    "hypernetworks": [], "face-restorers": [], "realesrgan-models": [], "cmd-flags": {},
    "scripts": {"txt2img": [], "img2img": []},
}  # fmt: skip
"""Lists that clients request and that are always empty here."""


class PasswordRoute(AuthenticatedRoute):
    """A route that also accepts the key as the password of `authorization: Basic`."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if not headers.get("origin") and not headers.get("sec-fetch-site"):  # no web page
            scope["headers"] = [
                (name, _as_bearer(value) if name == b"authorization" else value)
                for name, value in scope["headers"]
            ]
        await super().handle(scope, receive, send)


class PasswordWorkRoute(PasswordRoute, WorkRoute):
    is_work = True


def _as_bearer(authorization: bytes) -> bytes:
    """Convert a Basic password to a bearer token."""
    scheme, _, encoded = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        _, _, password = base64.b64decode(encoded, validate=True).partition(b":")
    except ValueError:
        return b""
    return b"Bearer " + password if password else b""


router = router_of(PasswordWorkRoute, "/sdapi/v1")
lists = router_of(PasswordRoute, "/sdapi/v1")


def _interruptible(context: AuthenticatedRequest) -> dict[asyncio.Task[Any], str]:
    """The client's running requests that `interrupt` cancels, with their ids.

    Two requests may have the same id: clients choose it.
    """
    owners = _RUNNING.setdefault(context.state, {})
    return owners.setdefault(context.client.owner, {})


@router.post("/txt2img", openapi_extra=json_document(bodies.Text2Image))
async def txt2img(context: Context) -> bodies.Drawn:
    """Draw from a prompt."""
    values = without_pictures(await read_json(context.request))
    body = validated(bodies.Text2Image, values)
    model = await _model(context, body)
    form = fields.translated(body, model.card, model.id)
    return await _drawn(context, model, body, form, values)


@router.post("/img2img", openapi_extra=json_document(bodies.Image2Image))
async def img2img(context: Context) -> bodies.Drawn:
    """Redraw pictures; with a mask, its white parts."""
    values = await read_json(context.request, takes_base64=True)
    pictures = {name: values[name] for name in ("init_images", "mask") if name in values}
    texts = without_pictures({name: values[name] for name in values.keys() - pictures})
    body = validated(bodies.Image2Image, texts | pictures)
    body.mask = body.mask or None  # "" means no mask
    model = await _model(context, body)
    task = model.card.task_for(["image", "mask_image"] if body.mask is not None else ["image"])
    size = None if task.takes("width") else _size(body, model.card)
    form = fields.translated(body, model.card, model.id, keeps_size=size is not None)
    form.values |= fields.check_fill(body, model.card)
    form.images = [as_url(picture, form.name) for picture in body.init_images]
    mask = None if body.mask is None else _mask_of(body)
    return await _drawn(context, model, body, form, texts, size=size, mask=mask)


async def _model(context: AuthenticatedRequest, body: bodies.Text2Image) -> ServedModel:
    """The model that the request's settings name, or the first model."""
    named = (body.override_settings or {}).get("sd_model_checkpoint")
    name = named if isinstance(named, str) and named else None
    return await context.load(name, "ready")


async def _drawn(
    context: AuthenticatedRequest,
    model: ServedModel,
    body: bodies.Text2Image,
    form: Form,
    values: dict[str, Any],
    **pictures: Any,
) -> bodies.Drawn:
    """Draw, until `interrupt`.

    Args:
        values: the sent fields, for the answer.
        pictures: `size` and `mask` of `parse_image_request`.
    """
    drawing = validated(schema.ImageRequest, form.values)

    async def draw() -> Any:
        parsed = await parse_image_request(context, drawing, form, model=model, **pictures)
        return await respond(context, parsed)

    task = asyncio.ensure_future(draw())
    answer: Any = None
    running = _interruptible(context)
    running[task] = context.request.scope["request_id"]
    try:
        answer = await task
    except asyncio.CancelledError:
        task.cancel()
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise  # the server stops
    finally:
        running.pop(task, None)
    if answer is None:  # interrupted: that program answers without pictures
        return bodies.Drawn(images=[], parameters=values, info='{"all_seeds": [], "infotexts": []}')
    files = [image.b64_json or "" for image in answer.data] if body.send_images is not False else []
    text = bodies.info(body, form.values, answer)
    return bodies.Drawn(images=files, parameters=values, info=text)


def _size(body: bodies.Image2Image, card: Card) -> tuple[int, int] | None:
    """The requested size, for a model whose result has the size of the input picture."""
    if body.width is None or body.height is None:
        return None
    multiple = card.size_multiple_px
    for name, side in (("width", body.width), ("height", body.height)):
        if not is_int(side) or side < 1 or side % multiple:
            raise SizeRejected.of(name, side, f"must be a multiple of {multiple}")
    if body.width * body.height > card.max_pixels:
        width, height = within((body.width, body.height), card.max_pixels, multiple)
        rule = f"at most {card.max_pixels} pixels, such as {width}x{height}"
        problem = f"{body.width}x{body.height} is not supported: {rule}"
        raise SizeRejected(problem, param="width")
    return body.width, body.height


def _mask_of(body: bodies.Image2Image) -> MakeMask:
    """Return a function that reads the mask for the input picture."""
    picture = as_url(body.mask, "mask")
    is_filled = body.inpainting_fill == 0
    radii = (body.mask_blur_x, body.mask_blur_y)
    across, down = radii if body.mask_blur is None else (body.mask_blur,) * 2
    fit = partial(
        fitted,
        blur=(across or 0, down or 0),
        is_inverted=bool(body.inpainting_mask_invert),
        is_rounded=body.mask_round is not False,
    )

    async def read(intake: ImageIntake, image: Any) -> tuple[Any, Any]:
        parsed = await intake.open(picture, "mask")
        then = partial(fit, size=image.size)
        mode: Mode = "RGBA" if parsed.has_alpha else "L"
        mask = await intake.decode(parsed, "mask", mode=mode, then=then)
        return mask, await intake.run(partial(filled, image, mask)) if is_filled else image

    return read


@lists.get("/progress")
async def progress(context: Context, skip_current_image: bool = False) -> bodies.ProgressResponse:
    """Mean progress of this API key's requests."""
    request_ids = list(_interruptible(context).values())
    steps = [(0, 0)]
    for request_id in set(request_ids):
        with contextlib.suppress(CarpoolError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                report = await context.state.observer.report(context.client.owner, request_id)
            steps += [(output.step, output.steps) for output in report.outputs]
    step, total = (sum(column) for column in zip(*steps, strict=True))
    return bodies.ProgressResponse(
        progress=min(0.99, step / total) if total else 0.0,
        state=bodies.ProgressState(
            job_count=len(request_ids), sampling_step=step, sampling_steps=total
        ),
    )


@lists.post("/interrupt")
@lists.post("/skip")
async def interrupt(context: Context) -> dict[str, Any]:
    """Cancel this key's requests to this API; their answers have no pictures."""
    for task in list(_interruptible(context)):
        task.cancel()
    return {}


@lists.get("/options", description="The settings; only the model is one here.")
async def get_options(context: Context) -> bodies.Options:
    return bodies.Options(sd_model_checkpoint=context.state.model_names[0])


@lists.post("/options")
async def set_options(body: bodies.Options, context: Context) -> dict[str, Any]:
    """Accept a setting that is so already or has no effect; refuse others."""
    model = await context.load(None, "loaded")
    fields.check_model(body.sd_model_checkpoint, model.card, model.id)
    values = body.model_dump(exclude_unset=True, exclude={"sd_model_checkpoint"})
    now = bodies.Options().model_dump()
    if fields.skipped_layers(values.get("CLIP_stop_at_last_layers"), model.card) is None:
        values.pop("CLIP_stop_at_last_layers", None)  # no effect
    for name, value in values.items():
        if value is not None and (name not in now or value != now[name]):
            rule = "cannot be set here: leave it out, or send it with a request"
            raise InvalidValue(f"{name[:60]}={show(value)} {rule}", param=name[:60])
    return {}


@lists.get("/sd-models", description="List the served models.")
async def sd_models(context: Context) -> list[dict[str, Any]]:
    unknown = {"hash": None, "sha256": None, "filename": "", "config": None}
    names = context.state.model_names
    return [{"title": name, "model_name": name, **unknown} for name in names]


@lists.get("/samplers")
async def samplers(context: Context) -> list[dict[str, Any]]:
    """List the model's sampler and its alternatives."""
    model = await context.load(None, "loaded")
    names = (bodies.SAMPLER, *model.card.schedulers)
    return [{"name": name, "aliases": [], "options": {}} for name in names]


@lists.get("/schedulers")
async def schedulers(context: Context) -> list[dict[str, Any]]:
    """List the model's noise schedule; names of samplers contain others."""
    name = {"name": bodies.SAMPLER.lower(), "label": bodies.SAMPLER, "aliases": None}
    return [name | {"default_rho": -1.0, "need_inner_model": False}]


@lists.get("/loras")
async def loras(context: Context) -> list[dict[str, Any]]:
    """List the adapters for `<lora:NAME:1>`."""
    model = await context.load(None, "loaded")
    offered = model.card.usable_adapters
    return [
        {"name": name_for_tag(adapter, offered), "alias": adapter.id, "path": "", "metadata": {}}
        for adapter in offered
    ]


@lists.get("/embeddings")
async def embeddings(context: Context) -> dict[str, dict[str, Any]]:
    """List the words of `--embeddings` with their vector counts."""
    model = await context.load(None, "loaded")
    unknown = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "shape": None}
    words = {word: unknown | {"vectors": count} for word, count in model.card.embeddings.items()}
    return {"loaded": words, "skipped": {}}


@lists.post("/refresh-checkpoints")
@lists.post("/refresh-loras")
async def refresh(context: Context) -> dict[str, Any]:
    """No effect: SIGHUP reads adapters again, and models are chosen at the start."""
    return {}


def _answering(empty: Any) -> Any:
    async def answer(context: Context) -> Any:
        """Always empty."""
        return empty

    return answer


for _name, _empty in EMPTY_LISTS.items():
    lists.add_api_route(f"/{_name}", _answering(_empty), methods=["GET"])
