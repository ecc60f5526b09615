"""`/v1/meshes` and `/v1/audio/generations`: meshes and sound, made by jobs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fastapi.responses import JSONResponse

from carpool.errors import InvalidValue, JobNotFound, PipelineFailed, UnsupportedParameter
from carpool.jobs.database import Record
from carpool.media.mesh import check_faces, encode_mesh, files_beside
from carpool.media.metadata import with_used
from carpool.media.sound import encode_sound
from carpool.request.parameters import check
from carpool.server.bodies import forms
from carpool.server.bodies.input_images import REFERENCE, reference_images
from carpool.server.bodies.schema import GenerationRequest, MeshRequest, SoundRequest
from carpool.server.bodies.schema_jobs import Deleted, MeshJob, Page
from carpool.server.dependencies import Context, WorkRoute, router_of
from carpool.server.openai_fields import engine_request, number_of, pipeline_parameters
from carpool.server.requests import read_form, translated
from carpool.server.responses.downloads import PARTS, Download, warnings_header
from carpool.server.routes import jobs
from carpool.server.state import AuthenticatedRequest, ServedModel
from carpool.types import CheckedRequest
from carpool.worker.protocol import Done

DURATIONS = (
    "audio_length_in_s", "audio_end_in_s", "audio_duration_s", "audio_duration", "duration",
)  # fmt: skip
"""Parameters of diffusers' pipelines for the duration of sound, seconds."""
_PICTURE = (REFERENCE, "image")

router = router_of(WorkRoute, "/v1")


def write_mesh(record: Record, outputs: Sequence[Done], folder: Path) -> None:
    """Write the file of a mesh's job."""
    [answer], output = outputs, record.work["output"]
    if answer.mesh is None:
        raise PipelineFailed("the pipeline gave no mesh")
    mesh, format = answer.mesh, output["format"]
    check_faces(mesh, output["max_faces"])
    told = with_used(output["told"], answer.settings)
    files = {f"mesh.{format}": encode_mesh(mesh, format, told, stem="mesh")}
    for name, content in (files | files_beside(mesh, format, "mesh")).items():
        (folder / name).write_bytes(content)


def write_sound(record: Record, outputs: Sequence[Done], folder: Path) -> None:
    """Write the file of a sound's job."""
    [answer], output = outputs, record.work["output"]
    if answer.sound is None:
        raise PipelineFailed("the pipeline gave no sound")
    content = encode_sound(
        answer.sound, output["format"], with_used(output["told"], answer.settings)
    )
    (folder / f"sound.{output['format']}").write_bytes(content)


def _checked(
    context: AuthenticatedRequest,
    model: ServedModel,
    body: GenerationRequest,
    makes: Literal["meshes", "sound"],
    extra: dict[str, Any],
) -> CheckedRequest:
    """Check a body.

    Args:
        extra: arguments of the pipeline that the body implies.

    Raises:
        Rejected, ModelNotFound: the message has the problem and the nearest valid value.
    """
    content = body.model_dump(exclude_unset=True, exclude_none=True)
    parameters = pipeline_parameters(model, body, content, makes, context.client)
    if body.size not in (None, "auto"):
        raise UnsupportedParameter(f"size: {makes} have none, leave it out", param="size")
    request = engine_request(body, context.client.key, parameters | extra, body.seed)
    return replace(check(model.card, request, from_json=True), model=model.id)


async def _submit(
    context: AuthenticatedRequest,
    kind: Literal["mesh", "sound"],
    model: ServedModel,
    body: MeshRequest | SoundRequest,
    checked: CheckedRequest,
    content: dict[str, Any],
    pictures: dict[str, Any] | None = None,
) -> Record:
    fields = {"model": model.id, "seeds": [checked.seed], "prompt": body.prompt}
    return await jobs.submit(
        context, kind, content, fields, [checked], pictures or {}, format=body.output_format,
        told=model.file_metadata(checked), max_faces=context.state.settings.max_faces,
    )  # fmt: skip


_MESH_BODY = forms.document(MeshRequest, [], {REFERENCE: forms.FILE}, {REFERENCE: forms.REFERENCE})


@router.post("/meshes", openapi_extra=_MESH_BODY)
async def create_mesh(context: Context) -> MeshJob:
    """Make a mesh from a picture or a prompt; answers with a job to poll."""
    form = await read_form(context, "restarting", *_PICTURE)
    body = forms.validated(MeshRequest, form.values)
    model = await context.model_of(body, "restarting")
    intake = context.intake()
    digests = await context.unless_disconnected(intake.run(form.digests))
    pictures = await context.unless_disconnected(reference_images(model.card, form, body, intake))
    checked = _checked(context, model, body, "meshes", pictures)
    content = form.values | ({"pictures": digests} if digests else {})
    record = await _submit(context, "mesh", model, body, checked, content, pictures)
    return await _mesh(context, record)


def _file_of(record: Record) -> str:
    """The file name of a mesh; a texture is a separate file."""
    return f"mesh.{record.work.get('output', {}).get('format', 'glb')}"


async def _mesh(context: AuthenticatedRequest, record: Record) -> MeshJob:
    name = _file_of(record)
    return MeshJob(
        url=jobs.signed_url(context, record, name) if name in record.files else None,
        status=record.state,
        prompt=record.asked.get("prompt", ""),
        output_format=name.partition(".")[2],
        bytes=record.files.get(name),
        seed=next(iter(record.asked.get("seeds", [])), 0),
        settings=jobs.settings_of(record),
        **await jobs.common_fields(context.state, record),
    )


async def _get(mesh_id: str, context: AuthenticatedRequest) -> Record:
    record = await context.state.runner.get(mesh_id, context.client.owner)
    if record.kind != "mesh":
        raise JobNotFound(f"job {mesh_id} makes no mesh: ask /v1/jobs/{mesh_id}")
    return record


@router.get("/meshes")
async def list_meshes(context: Context, part: jobs.PageQuery) -> Page[MeshJob]:
    """List this client's meshes, newest first."""
    owner = context.client.owner
    records, has_more = await context.state.runner.page(owner, kind="mesh", **part)
    return Page[MeshJob].of([await _mesh(context, record) for record in records], has_more)


@router.get("/meshes/{mesh_id}", description="The state of a mesh.")
async def get_mesh(mesh_id: str, context: Context) -> MeshJob:
    return await _mesh(context, await _get(mesh_id, context))


@router.delete("/meshes/{mesh_id}")
async def delete_mesh(mesh_id: str, context: Context) -> Deleted:
    """Delete a mesh and its file; a running job stops before its next step."""
    await _get(mesh_id, context)
    await context.state.runner.remove(mesh_id, context.client.owner)
    return Deleted(id=mesh_id, object="mesh.deleted")


@router.get("/meshes/{mesh_id}/content", response_class=Download, responses=PARTS)
async def get_mesh_content(mesh_id: str, context: Context) -> Download:
    """Download the file of a mesh."""
    record = await _get(mesh_id, context)
    return await jobs.file_of(context.state, record, _file_of(record))


@router.post("/audio/generations", response_class=Download, responses={**PARTS, **jobs.ACCEPTED})
async def create_sound(body: SoundRequest, context: Context) -> Any:
    """Make sound and answer with its file; a disconnect cancels the request."""
    model = await context.model_of(body, "restarting")
    body = translated(context, body, model.card)
    limit_s = context.state.settings.max_sound
    checked = _checked(context, model, body, "sound", _duration(model, body, limit_s))
    values = {p.name: p.default for p in model.card.task(checked.task).parameters}
    values |= dict(checked.arguments)
    for name in DURATIONS:
        if isinstance(length_s := values.get(name), (int, float)):
            _check_length(name, length_s, limit_s)
    content = body.model_dump(exclude_unset=True)
    record = await _submit(context, "sound", model, body, checked, content)
    if body.background_job:
        status = await jobs.status_of(context, record)
        return JSONResponse(status.model_dump(), 202)
    record = await jobs.wait_for_end(context, record)
    answer = await jobs.file_of(context.state, record, f"sound.{body.output_format}")
    answer.headers["x-file-url"] = jobs.signed_url(context, record, next(iter(record.files)))
    answer.headers["x-job-id"], answer.headers["x-seed"] = record.id, str(checked.seed)
    answer.headers.update(warnings_header(list(record.warnings)))
    return answer


def _check_length(name: str, length_s: float, limit_s: float, value: Any = None) -> None:
    if not 0 < length_s <= limit_s:
        rule = f"must be above 0, at most {limit_s:g} (--max-sound)"
        raise InvalidValue.of(name, length_s if value is None else value, rule)


def _duration(model: ServedModel, body: SoundRequest, limit_s: float) -> dict[str, float]:
    """The body's `seconds` as a parameter of the model's pipeline."""
    length_s = number_of(body.seconds)
    if length_s is None:
        return {}
    _check_length("seconds", length_s, limit_s, body.seconds)
    task = model.card.tasks[0]
    name = next((name for name in DURATIONS if task.takes(name)), None)
    if name is None:
        rule = "its sound has a length of its own: leave it out"
        raise UnsupportedParameter(f"{model.id} takes no seconds: {rule}", param="seconds")
    return {name: length_s}
