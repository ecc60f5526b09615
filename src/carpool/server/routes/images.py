"""`/v1/images`, `/v1/models`, and signed links to files."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from carpool.errors import ModelNotFound
from carpool.request.card import Card
from carpool.server.access.signed_links import TTL_S
from carpool.server.bodies import schema
from carpool.server.bodies import schema_reports as reports
from carpool.server.bodies.forms import FILE, MOST_IMAGES, REFERENCE, document, validated
from carpool.server.bodies.json_pictures import NAMES
from carpool.server.dependencies import ERRORS, Context, ServerState, WorkRoute, router_of
from carpool.server.image_request import ParsedImageRequest
from carpool.server.requests import parse_image_request, read_form
from carpool.server.responses.downloads import PARTS, Download
from carpool.server.responses.respond import respond
from carpool.server.responses.stage_metrics import stage_metrics
from carpool.server.responses.stream import STREAMED
from carpool.server.routes.jobs import ACCEPTED, TYPES, file_of, status_of, submit_images
from carpool.server.state import AppState, AuthenticatedRequest

_NAMES = "image", "images"  # field in a form, field in JSON
_LIST = {"type": "array", "maxItems": MOST_IMAGES}
_IN_FORM = {
    "image": {**_LIST, "items": FILE},
    "mask": {**FILE, "description": "PNG; transparent parts are redrawn"},
}
_IN_JSON = {"images": {**_LIST, "items": REFERENCE}, "mask": REFERENCE}
_ANSWERS: dict[str, Any] = {
    "response_model": schema.ImagesResponse,
    "responses": {**STREAMED, **ACCEPTED},
}

router = router_of(WorkRoute, "/v1")
links = APIRouter(responses=ERRORS)  # no keys: browsers send none for pictures


@router.post("/images/generations", **_ANSWERS)
async def create_images(body: schema.ImageRequest, context: Context) -> Any:
    """Draw pictures from prompts."""
    return await _answer(context, await parse_image_request(context, body))


@router.post(
    "/images/edits",
    **_ANSWERS,
    openapi_extra=document(schema.ImageRequest, ["prompt", *_NAMES], _IN_FORM, _IN_JSON),
)
async def create_edit(context: Context) -> Any:
    """Edit a picture: by a prompt, inside a mask, or from several pictures."""
    return await _edit(context, "edit")


@router.post(
    "/images/variations",
    **_ANSWERS,
    openapi_extra=document(schema.ImageRequest, _NAMES, _IN_FORM, _IN_JSON),
)
async def create_variation(context: Context) -> Any:
    """Vary a picture, without a prompt."""
    return await _edit(context, "variation")


async def _edit(context: AuthenticatedRequest, task: Literal["edit", "variation"]) -> Any:
    form = await read_form(context, "restarting", *_NAMES, "url", "mask", takes_nested=True)
    if task == "variation":
        form.values.setdefault("prompt", "")
    body = validated(schema.ImageRequest, form.values)
    return await _answer(context, await parse_image_request(context, body, form, task))


async def _answer(context: AuthenticatedRequest, image_request: ParsedImageRequest) -> Any:
    """Answer with a job, with pictures, or with a stream of events."""
    if image_request.body.background_job:
        record = await submit_images(context, image_request)
        return JSONResponse((await status_of(context, record)).model_dump(), 202)
    answer = await respond(context, image_request)
    if image_request.body.return_stage_metrics and isinstance(answer, schema.ImagesResponse):
        metrics = await stage_metrics(context.state, image_request.model.id, answer.timings)
        return answer.model_copy(update={"metrics": metrics})
    return answer


@router.get("/models", description="List the served models.")
async def list_models(context: Context) -> reports.ModelList:
    state = context.state
    return reports.ModelList(data=[_model_entry(state, name) for name in state.fleet.deployments])


@router.get("/models/{model:path}", description="One served model.")
async def get_model(model: str, context: Context) -> reports.ModelEntry:
    entry = _model_entry(context.state, model)
    if model != entry.id:
        raise ModelNotFound(f"model {model[:60]!r} is not served here: use {entry.id!r}")
    return entry


def _model_entry(state: AppState, name: str) -> reports.ModelEntry:
    """The entry of a model; its worker may be down, and one of several may not be loaded yet."""
    deployment = state.fleet.of(name)
    now: dict[str, Any] = {"state": deployment.state}
    if not state.fleet.is_single:
        now["ready_in_s"] = deployment.ready_in_s(asyncio.get_running_loop().time())
        if deployment.ready is None:
            return reports.ModelEntry(id=deployment.name, created=state.started_s, **now)
    model = state.model("loaded", name)
    card, size = model.card, model.card.usual_size_px
    return reports.ModelEntry(
        id=model.id,
        created=state.started_s,
        pipeline=card.pipeline,
        tasks=[task.name for task in card.tasks],
        default_size=None if size is None else f"{size[0]}x{size[1]}",
        size_multiple_px=card.size_multiple_px,
        parameters=_parameters_of(card),
        writers=[task.name.rpartition(":")[2] for task in card.writers],
        lora=list(card.lora),
        schedulers=list(card.schedulers),
        private=deployment.pool.private_tasks if deployment.pool else {},
        limits=reports.ModelLimits(
            n=model.max_n,
            num_inference_steps=card.max_steps,
            pixels=card.max_pixels,
            num_frames=state.settings.max_frames,
            pictures=max((t.max_images for t in card.tasks if t.takes("image")), default=0),
        ),
        **now,
    )


def _parameters_of(card: Card) -> list[reports.ModelParameter]:
    """The parameters of requests, with their defaults and tasks."""
    names = set(card.names()) - {"output_type"}  # requests use output_format
    parameters: dict[str, reports.ModelParameter] = {}
    for task in card.tasks:
        is_video = task.makes == "videos"
        body_names = {"image": "input_reference"} if is_video else {"mask_image": "mask"}
        for parameter in task.parameters:
            is_picture = parameter.name in ("image", "mask_image") or (
                task.makes == "pictures" and parameter.name in NAMES
            )
            if parameter.name not in names or (parameter.kind == "other" and not is_picture):
                continue
            entry = reports.ModelParameter(
                name=body_names.get(parameter.name, parameter.name),
                kind="picture" if is_picture else parameter.kind,
                required=parameter.required,
                default=card.defaults.get(parameter.name, parameter.default),
                tasks=[],
            )
            parameters.setdefault(entry.name, entry).tasks.append(task.name)
    if card.schedulers:
        tasks = [task.name for task in card.tasks]
        parameters["scheduler"] = reports.ModelParameter(
            name="scheduler", kind="str", required=False, default=card.scheduler, tasks=tasks
        )
    switches = ["enhance_prompt"] if card.enhancer else []
    for name in [*switches, *(["prompt_weights"] if card.weights_reader == "compel" else [])]:
        parameters[name] = reports.ModelParameter(
            name=name, kind="bool", required=False,
            default=name == "enhance_prompt" and card.enhances,
            tasks=[task.name for task in card.tasks],
        )  # fmt: skip
    return list(parameters.values())


@links.get("/v1/files/{file_id}", response_class=Download, responses=PARTS)
def get_file(state: ServerState, file_id: str, expires: str = "", signature: str = "") -> Download:
    """Download a picture requested with `response_format` "url"."""
    path = state.files.get(file_id, expires, signature)
    headers = {"cache-control": f"private, max-age={TTL_S}"}
    return Download(path, media_type=TYPES[path.suffix], headers=headers)


@links.get("/v1/files/{job_id}/{name}", response_class=Download, responses=PARTS)
async def get_job_file(
    state: ServerState, job_id: str, name: str, expires: str = "", signature: str = ""
) -> Download:
    """Download a file of a job by its `signed_url`."""
    state.files.check(f"{job_id}/{name}", expires, signature)
    record = await asyncio.to_thread(state.runner.store.get, job_id, None)
    return await file_of(state, record, name)
