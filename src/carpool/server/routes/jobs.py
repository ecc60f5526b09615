"""`/v1/jobs`: jobs of every kind, and what all routes that answer with a job have in common.

`videos.py` shows the jobs of videos in OpenAI's words.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from carpool.errors import FileNotReady, UnsupportedParameter, without_paths
from carpool.jobs.database import Record
from carpool.jobs.work import work_of
from carpool.media.inputs import packed
from carpool.media.outputs import write_pictures
from carpool.server.access.idempotency import digest_of, key_of
from carpool.server.access.keys import APIClient
from carpool.server.answers.downloads import PARTS, Download
from carpool.server.answers.respond import unless_disconnected
from carpool.server.bodies import schema
from carpool.server.bodies.schema_jobs import JobDeleted, JobFile, JobList, JobStatus
from carpool.server.dependencies import ERRORS, AuthenticatedRoute, Client, State
from carpool.server.state import AppState, ServedModel
from carpool.telemetry import tracing
from carpool.types import CheckedRequest
from carpool.worker.protocol import Done

TYPES = {".png": "image/png", ".jpeg": "image/jpeg", ".jpg": "image/jpeg"}
TYPES |= {".webp": "image/webp", ".mp4": "video/mp4"}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"model": JobStatus, "description": "of a background_job"}
}
"""For the OpenAPI document: an answer may be a job."""

Order = Annotated[Literal["asc", "desc"], Query()]
Limit = Annotated[int, Query(ge=1, le=100)]

router = APIRouter(prefix="/v1", route_class=AuthenticatedRoute, responses=ERRORS)


async def submit(
    state: AppState,
    request: Request,
    client: APIClient,
    kind: str,
    body: dict[str, Any],
    asked: dict[str, Any],
    work: dict[str, Any],
    inputs: Mapping[str, bytes],
) -> Record:
    """Put a checked request into the store; it is acknowledged once this returns.

    Args:
        body: as the client sent it: with the same `Idempotency-Key` it must be the same.
        asked: what clients see of it.
        work: of `work_of`.
        inputs: the files that its `inputs` name.

    Raises:
        IdempotencyMismatch, Overloaded, StoreFailed, RateLimited: see `JobStore.submit`.
    """
    digest = digest_of(kind, request.url.path, body)
    request.state.slot.release()  # a job counts as one in the store
    record, _ = await state.runner.submit(
        kind,
        asked,
        work | {"trace": tracing.carried()},
        owner=client.owner,
        key=key_of(request),
        digest=digest,
        room=request.state.slot.check,
        inputs=inputs,
    )
    told = asked | record.asked
    tracing.asked(told["model"], told["seeds"], kind, job_id=record.id)
    return record


async def submit_images(
    state: AppState,
    request: Request,
    client: APIClient,
    model: ServedModel,
    body: schema.ImageRequest,
    make: Callable[[], Sequence[CheckedRequest]],
    sent: Callable[[], dict[str, Any]],
    pictures: Mapping[str, Any] | None,
) -> Record:
    """Accept a request for pictures with `background_job`; the arguments are as for `respond`."""
    if body.stream:
        raise UnsupportedParameter("stream: a job is polled: leave it out", param="stream")
    made = make()
    packing = state.intake(request).run(partial(packed, pictures or {}))
    names, inputs = await unless_disconnected(request, packing)
    work = work_of(
        model.id,
        made,
        inputs=names,
        format=body.output_format or "png",
        compression=100 if body.output_compression is None else body.output_compression,
        told=[model.file_metadata(one) for one in made],
    )
    asked = {"model": model.id, "seeds": [one.seed for one in made]}
    return await submit(state, request, client, "image", sent(), asked, work, inputs)


def write_images(record: Record, done: Sequence[Done], folder: Path) -> None:
    """The files of a job of pictures."""
    form = record.work["output"]
    pictures = [one.pictures[0] for one in done]
    write_pictures(pictures, form["told"], folder, form["format"], form["compression"])


async def common_fields(state: AppState, record: Record) -> dict[str, Any]:
    """What every job shows of its record."""
    store, clock = state.runner.store, state.runner.store.clock
    position = eta_s = error = None
    if record.state == "queued":
        position = await asyncio.to_thread(store.ahead_of, record)
    elif record.state == "in_progress" and record.started_s is not None and record.progress:
        ran_s = min(clock() - record.started_s, clock.uptime_s() - record.created_up_s)
        eta_s = round(max(ran_s, 0.0) * (100 - record.progress) / record.progress, 1)
    if record.error is not None:  # also one of an older server, or of a spoiled row
        error = record.error | {"message": without_paths(str(record.error.get("message", "")))}
        error |= {"code": "cancelled"} if record.state == "cancelled" else {}
    return {
        "id": record.id,
        "model": str(record.asked.get("model", "")),
        "progress": record.progress,
        "created_at": int(record.created_s),
        "completed_at": _moment(record.ended_s),
        "expires_at": _moment(store.expires_s(record)),
        "error": error,
        "queue_position": position,
        "eta_s": eta_s,
    }


async def status_of(state: AppState, record: Record, request: Request) -> JobStatus:
    """A job as `/v1/jobs` shows it, with paths as this client has to write them."""
    url = f"{request.scope.get('root_path', '')}/v1/jobs/{record.id}/files"
    return JobStatus(
        kind="video" if record.kind == "video" else "image",
        status=record.state,
        started_at=_moment(record.started_s),
        seeds=record.asked.get("seeds", []),
        files=[
            JobFile(name=name, bytes=size, url=f"{url}/{name}")
            for name, size in record.files.items()
        ],
        **await common_fields(state, record),
    )


def _moment(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


async def file_of(state: AppState, record: Record, name: str) -> Download:
    """A file of a job, or FileNotReady."""
    path = await asyncio.to_thread(state.runner.store.file, record, name)
    if path is None:
        raise FileNotReady(
            f"job {record.id} has no file {name[:80]!r}: it is {record.state}, with "
            f"{', '.join(record.files) or 'no files'}"
        )
    # only a browser may keep it, and must ask each time whether it still may
    return Download(
        path,
        media_type=TYPES[path.suffix],
        filename=f"{record.id}-{name}",
        headers={"cache-control": "private, no-cache"},
    )


@router.get("/jobs")
async def list_jobs(
    request: Request,
    state: State,
    client: Client,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> JobList:
    """Jobs of this client, the newest first."""
    records, has_more = await state.runner.page(
        client.owner, after=after, limit=limit, is_newest_first=order == "desc"
    )
    return JobList.of([await status_of(state, one, request) for one in records], has_more)


@router.get("/jobs/{job_id}")
async def get_job(job_id: str, request: Request, state: State, client: Client) -> JobStatus:
    return await status_of(state, await state.runner.get(job_id, client.owner), request)


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, request: Request, state: State, client: Client) -> JobStatus:
    """End a job before its next step; one that has ended stays as it is."""
    return await status_of(state, await state.runner.cancel(job_id, client.owner), request)


@router.delete("/jobs/{job_id}")
async def delete_job(job_id: str, state: State, client: Client) -> JobDeleted:
    """Forget a job and its files; one that runs ends before its next step."""
    await state.runner.remove(job_id, client.owner)
    return JobDeleted(id=job_id)


@router.get("/jobs/{job_id}/files/{name}", response_class=Download, responses=PARTS)
async def get_file(job_id: str, name: str, state: State, client: Client) -> Download:
    return await file_of(state, await state.runner.get(job_id, client.owner), name)
