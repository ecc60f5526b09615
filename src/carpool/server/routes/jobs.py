"""`/v1/jobs`: jobs of every kind, and code that all routes with jobs share.

`videos.py` shows jobs of videos in OpenAI's format.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, Query

from carpool.errors import FileNotReady, UnsupportedParameter, by_code, without_paths
from carpool.jobs.database import Record
from carpool.jobs.work import work_of
from carpool.media.inputs import packed
from carpool.media.metadata import with_used, without_prompts
from carpool.media.outputs import encode_image
from carpool.server.access.idempotency import digest_of, key_of
from carpool.server.bodies.schema_jobs import Deleted, JobFile, JobStatus, Page
from carpool.server.deliveries import deliveries_of
from carpool.server.dependencies import AuthenticatedRoute, Context, router_of
from carpool.server.image_request import ParsedImageRequest
from carpool.server.responses.downloads import PARTS, Download
from carpool.server.state import AppState, AuthenticatedRequest
from carpool.telemetry import tracing
from carpool.types import CheckedRequest
from carpool.worker.protocol import Done

TYPES = {  # media types of the files that the server writes
    ".png": "image/png", ".jpeg": "image/jpeg", ".jpg": "image/jpeg", ".webp": "image/webp",
    ".mp4": "video/mp4", ".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg",
    ".glb": "model/gltf-binary", ".obj": "model/obj", ".ply": "model/ply", ".mtl": "model/mtl",
}  # fmt: skip
KINDS: dict[str, Literal["video", "mesh", "sound"]]
KINDS = {"video": "video", "mesh": "mesh", "sound": "sound"}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"model": JobStatus, "description": "for a background_job"}
}
"""OpenAPI description of an answer that may be a job."""

router = router_of(AuthenticatedRoute, "/v1")


async def _page(
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    return {"after": after, "limit": limit, "is_newest_first": order == "desc"}


PageQuery = Annotated[dict[str, Any], Depends(_page)]
"""The part of a list that a client asks for."""


async def submit(
    context: AuthenticatedRequest,
    kind: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    requests: Sequence[CheckedRequest],
    pictures: Mapping[str, Any],
    *,
    keeps_inputs: bool = False,
    **output: Any,
) -> Record:
    """Put checked requests into the store; after the return they are durable.

    Args:
        body: as sent; requests with the same `Idempotency-Key` must have equal bodies.
        fields: public fields of the job.
        requests: one for each output.
        pictures: input pictures, by argument of the pipeline.
        keeps_inputs: the pictures stay after the job's end.
        output: options of the file writer.

    Raises:
        IdempotencyMismatch, Overloaded, StoreFailed, RateLimited: see `JobStore.submit`.
    """
    packing = context.intake().run(partial(packed, pictures))
    names, inputs = await context.unless_disconnected(packing)
    work = work_of(fields["model"], requests, names, **output)
    work |= {"keep": list(inputs)} if inputs and keeps_inputs else {}
    request = context.request
    digest = digest_of(kind, request.url.path, body)
    deliveries = deliveries_of(context.state.settings, body.get("webhook"))
    request.state.slot.release()  # from here on the store counts it as a job
    record = await context.state.runner.submit(
        kind, fields, work | {"trace": tracing.carried()}, owner=context.client.owner,
        key=key_of(request), digest=digest, room=request.state.slot.check, inputs=inputs,
        deliveries=deliveries,
    )  # fmt: skip
    shown_fields = fields | record.asked
    tracing.asked(shown_fields["model"], shown_fields["seeds"], kind, job_id=record.id)
    return record


async def wait_for_end(context: AuthenticatedRequest, record: Record) -> Record:
    """Wait for the end of a job; a client disconnect cancels the job.

    Raises:
        CarpoolError: the error of the job.
    """
    runner, owner = context.state.runner, context.client.owner
    try:
        record = await context.unless_disconnected(runner.ended(record.id, owner))
    except BaseException:
        await asyncio.shield(runner.cancel(record.id, owner))
        raise
    if (error := record.error) is not None:
        code = "cancelled" if record.state == "cancelled" else str(error.get("code"))
        message = without_paths(str(error.get("message", "")))
        raise by_code(code)(message, param=error.get("param"))
    return record


async def submit_images(context: AuthenticatedRequest, image_request: ParsedImageRequest) -> Record:
    """Accept a request for pictures with `background_job`."""
    model, body = image_request.model, image_request.body
    if body.stream:
        raise UnsupportedParameter("stream: jobs are polled, leave it out", param="stream")
    requests, pictures = image_request.requests, image_request.pictures
    fields = {"model": model.id, "seeds": [part.seed for part in requests]}
    return await submit(
        context, "image", image_request.identity(), fields, requests, pictures,
        format=body.output_format or "png",
        compression=100 if body.output_compression is None else body.output_compression,
        told=[model.file_metadata(part) for part in requests],
    )  # fmt: skip


def write_images(record: Record, outputs: Sequence[Done], folder: Path) -> None:
    """Write the files of a picture job: `0.png`, `1.png`, ..."""
    form = record.work["output"]
    for number, (data, output) in enumerate(zip(form["told"], outputs, strict=True)):
        picture, metadata = output.pictures[0], with_used(data, output.settings)
        if metadata:
            metadata |= {"width": picture.width, "height": picture.height}
        file = encode_image(picture, form["format"], form["compression"], metadata)
        (folder / f"{number}.{form['format']}").write_bytes(file)


async def common_fields(state: AppState, record: Record) -> dict[str, Any]:
    """The public fields that jobs of every kind have."""
    store, clock = state.runner.store, state.runner.store.clock
    position = eta_s = error = None
    if record.state == "queued":
        position = await asyncio.to_thread(store.ahead_of, record)
    elif record.state == "in_progress" and record.started_s is not None and record.progress:
        ran_s = min(clock() - record.started_s, clock.uptime_s() - record.created_up_s)
        eta_s = round(max(ran_s, 0.0) * (100 - record.progress) / record.progress, 1)
    if record.error is not None:  # may be from an older server or a corrupt row
        error = record.error | {"message": without_paths(str(record.error.get("message", "")))}
        error |= {"code": "cancelled"} if record.state == "cancelled" else {}
    return {
        "id": record.id, "model": str(record.asked.get("model", "")), "progress": record.progress,
        "created_at": int(record.created_s), "completed_at": _moment(record.ended_s),
        "expires_at": _moment(store.expires_s(record)), "error": error,
        "queue_position": position, "eta_s": eta_s, "warnings": list(record.warnings) or None,
        "skipped_steps": list(record.skipped_steps) or None,
        "revised_prompt": (record.settings or {}).get("revised_prompt"),
        "deliveries": record.deliveries or None,
    }  # fmt: skip


async def status_of(context: AuthenticatedRequest, record: Record) -> JobStatus:
    """A job in the format of `/v1/jobs`, with paths under the client's root path."""
    url = f"{context.request.scope.get('root_path', '')}/v1/jobs/{record.id}/files"
    return JobStatus(
        kind=KINDS.get(record.kind, "image"),
        status=record.state,
        started_at=_moment(record.started_s),
        seeds=record.asked.get("seeds", []),
        files=[
            JobFile(
                name=name,
                bytes=size,
                url=f"{url}/{name}",
                signed_url=signed_url(context, record, name),
            )
            for name, size in record.files.items()
        ],
        settings=settings_of(record),
        task=_first(record).get("task", ""),
        **await common_fields(context.state, record),
    )


def signed_url(context: AuthenticatedRequest, record: Record, name: str) -> str:
    """The client's path of a file: no key needed, valid for an hour."""
    root = context.request.scope.get("root_path", "")
    return f"{root}{context.state.files.link(record.id, name)}"


def settings_of(record: Record) -> dict[str, Any]:
    """Settings that reproduce a job's outputs, except for input pictures."""
    first, output = _first(record), record.work.get("output", {})
    settings = {**first.get("arguments", {}), **without_prompts(record.settings or {})}
    parts = [part for part in record.work.get("jobs") or [] if isinstance(part, dict)]
    texts = [part.get("arguments", {}).get("prompt") for part in parts]
    prompts = list(dict.fromkeys(text for text in texts if isinstance(text, str)))
    settings |= {"seed": first.get("seed", 0), "n": len(parts) // max(1, len(prompts))}
    if len(prompts) > 1:
        settings["prompt"] = prompts
    if lora := first.get("lora"):
        settings["lora"] = [{"id": name, "scale": scale} for name, scale in lora]
    return settings | ({"fps": output["fps"]} if "fps" in output else {})


def _first(record: Record) -> dict[str, Any]:
    """The first stored request of a job; {} for a corrupt row."""
    parts = record.work.get("jobs") or [{}]
    return parts[0] if isinstance(parts[0], dict) else {}


def _moment(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


async def file_of(state: AppState, record: Record, name: str) -> Download:
    """A file of a job; FileNotReady if it does not exist."""
    path = await asyncio.to_thread(state.runner.store.file, record, name)
    if path is None:
        raise FileNotReady(
            f"job {record.id} has no file {name[:80]!r}: it is {record.state}, with "
            f"{', '.join(record.files) or 'no files'}"
        )
    # only browsers may cache it, and they must revalidate each time
    return Download(
        path,
        media_type=TYPES[path.suffix],
        filename=f"{record.id}-{name}",
        headers={"cache-control": "private, no-cache"},
    )


@router.get("/jobs")
async def list_jobs(context: Context, part: PageQuery) -> Page[JobStatus]:
    """List this client's jobs, newest first."""
    records, has_more = await context.state.runner.page(context.client.owner, **part)
    return Page[JobStatus].of([await status_of(context, record) for record in records], has_more)


@router.get("/jobs/{job_id}", description="The state of a job.")
async def get_job(job_id: str, context: Context) -> JobStatus:
    return await status_of(context, await _get(job_id, context))


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, context: Context) -> JobStatus:
    """Cancel a job before its next step; a finished job does not change."""
    record = await context.state.runner.cancel(job_id, context.client.owner)
    return await status_of(context, record)


@router.delete("/jobs/{job_id}")
async def delete_job(job_id: str, context: Context) -> Deleted:
    """Delete a job and its files; a running job stops before its next step."""
    await context.state.runner.remove(job_id, context.client.owner)
    return Deleted(id=job_id, object="job.deleted")


@router.get("/jobs/{job_id}/files/{name}", response_class=Download, responses=PARTS)
async def get_file(job_id: str, name: str, context: Context) -> Download:
    """Download a file of a job."""
    return await file_of(context.state, await _get(job_id, context), name)


async def _get(job_id: str, context: AuthenticatedRequest) -> Record:
    return await context.state.runner.get(job_id, context.client.owner)
