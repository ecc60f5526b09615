"""Work that is answered with a job: pictures in the background, and what all jobs have in common.

`/v1/jobs` shows, cancels and deletes jobs of every kind and serves their files; `videos.py` says
the same in OpenAI's words for videos.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from carpool.errors import FileNotReady, UnsupportedParameter, without_paths
from carpool.jobs.database import Record
from carpool.jobs.runner import Runner
from carpool.jobs.work import work_of
from carpool.media.inputs import packed
from carpool.media.outputs import write_pictures
from carpool.media.reader import Intake, PictureReader
from carpool.server.access.idempotency import digest_of, key_of
from carpool.server.access.keys import Client
from carpool.server.access.limits import Place
from carpool.server.answers.downloads import PARTS, Download
from carpool.server.answers.responder import unless_gone
from carpool.server.bodies import schema
from carpool.server.bodies.schema_jobs import JobDeleted, JobFile, Jobs, JobStatus
from carpool.server.bodies.strict import StrictRoute
from carpool.server.routes.images import Served, make_jobs
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


@dataclass(frozen=True, slots=True)
class Office:
    """What the routes of jobs need."""

    runner: Runner
    served: Callable[[], Served]  # may raise: no job can be accepted now
    owner: Callable[..., Any]  # dependency: whose jobs a client sees
    client: Callable[..., Any]  # dependency: who asks, a `Client`
    max_frames: int
    reader: PictureReader  # of pictures that clients send

    def intake(self, request: Request, tenant: str) -> Intake:
        """Reads the pictures of a request."""
        return Intake(self.reader, tenant, request.state.held)


async def accept(
    office: Office,
    request: Request,
    owner: str,
    kind: str,
    body: dict[str, Any],
    asked: dict[str, Any],
    work: dict[str, Any],
    inputs: Mapping[str, bytes] | None = None,
) -> Record:
    """Put a checked request into the store; it is acknowledged once this returns.

    Args:
        body: as the client sent it: with the same `Idempotency-Key` it must be the same.
        asked: what clients see of it.
        work: of `work_of`.
        inputs: the files that its `inputs` name.

    Raises:
        IdempotencyMismatch, Overloaded, StoreFailed: see `JobStore.submit`.
        RateLimited: its key has too much open already.
    """
    digest = digest_of(kind, request.url.path, body)
    place: Place = request.state.place
    place.leave()  # a job counts as one in the store
    work = work | {"trace": tracing.carried()}
    record, _ = await office.runner.submit(
        kind,
        asked,
        work,
        owner=owner,
        key=key_of(request),
        digest=digest,
        room=place.check,
        inputs=inputs or {},
    )
    told = asked | record.asked
    tracing.asked(told["model"], told["seeds"], kind, job_id=record.id)
    return record


async def accept_images(
    office: Office | None,
    request: Request,
    client: Client,
    body: schema.ImageRequest,
    *,
    pictures: Mapping[str, Any] | None = None,
    digests: Sequence[str] = (),
) -> JobStatus:
    """A request for pictures with `background_job`.

    Args:
        pictures: that came with it, and what follows from them, as the pipeline's arguments.
        digests: of the pictures, as they were sent.

    Raises:
        CarpoolError: whatever is wrong with it; nothing was accepted.
    """
    if body.stream:
        raise UnsupportedParameter("stream: a job is polled: leave it out", param="stream")
    if office is None:
        raise UnsupportedParameter("there are no jobs here", param="background_job")
    served = office.served()
    jobs = make_jobs(served, body, key=client.key, pictures=pictures)
    packing = office.intake(request, client.owner).run(partial(packed, pictures or {}))
    names, inputs = await unless_gone(request, packing)
    work = work_of(
        served.id,
        jobs,
        inputs=names,
        format=body.output_format or "png",
        compression=100 if body.output_compression is None else body.output_compression,
        told=[served.told(settings_of(served, job)) for job in jobs],
    )
    asked = {"model": served.id, "seeds": [job.seed for job in jobs]}
    sent = body.model_dump(exclude_unset=True) | ({"pictures": digests} if digests else {})
    record = await accept(office, request, client.owner, "image", sent, asked, work, inputs)
    return await status_of(office, record, request)


def settings_of(served: Served, job: CheckedRequest) -> dict[str, Any]:
    """What a file is made with."""
    settings = {"model": served.id, "seed": job.seed, **job.arguments}
    return settings | ({"lora": job.lora} if job.lora else {})


def write_images(record: Record, done: Sequence[Done], folder: Path) -> None:
    """The files of a job of pictures."""
    form = record.work["output"]
    pictures = [one.pictures[0] for one in done]
    write_pictures(pictures, form["told"], folder, form["format"], form["compression"])


async def status_of(office: Office, record: Record, request: Request) -> JobStatus:
    """A job as `/v1/jobs` shows it, with paths as this client has to write them."""
    place, eta_s = await outlook(office, record)
    root = request.scope.get("root_path", "")
    return JobStatus(
        id=record.id,
        kind="video" if record.kind == "video" else "image",
        model=str(record.asked.get("model", "")),
        status=record.state,
        progress=record.progress,
        created_at=int(record.created_s),
        started_at=None if record.started_s is None else int(record.started_s),
        completed_at=None if record.ended_s is None else int(record.ended_s),
        expires_at=expiry_of(office, record),
        seeds=record.asked.get("seeds", []),
        files=[
            JobFile(name=name, bytes=size, url=f"{root}/v1/jobs/{record.id}/files/{name}")
            for name, size in record.files.items()
        ],
        error=error_of(record),
        queue_position=place,
        eta_s=eta_s,
    )


async def outlook(office: Office, record: Record) -> tuple[int | None, float | None]:
    """How many jobs wait before this one, and how many seconds it may still take, if known."""
    if record.state == "queued":
        return await asyncio.to_thread(office.runner.store.ahead_of, record), None
    if record.state != "in_progress" or record.started_s is None or not record.progress:
        return None, None
    clock = office.runner.store.clock
    ran_s = min(clock() - record.started_s, clock.uptime_s() - record.created_up_s)
    ran_s = max(ran_s, 0.0)
    return None, round(ran_s * (100 - record.progress) / record.progress, 1)


def expiry_of(office: Office, record: Record) -> int | None:
    expires_s = office.runner.store.expires_s(record)
    return None if expires_s is None else int(expires_s)


def error_of(record: Record) -> Any:
    if record.error is None:
        return None
    # also that of an older server, or of a row that the disk has spoiled
    told = {"message": without_paths(str(record.error.get("message", "")))}
    return record.error | told | ({"code": "cancelled"} if record.state == "cancelled" else {})


async def file_of(office: Office, record: Record, name: str) -> Download:
    """A file of a job; parts of it where the client asks for a range.

    Raises:
        FileNotReady: there is none, or not yet.
    """
    path = await asyncio.to_thread(office.runner.store.file, record, name)
    if path is None:
        raise FileNotReady(
            f"job {record.id} has no file {name[:80]!r}: it is {record.state}, with "
            f"{', '.join(record.files) or 'no files'}"
        )
    # a browser may keep it, but asks each time whether it still may have it; nobody else may
    return Download(
        path,
        media_type=TYPES[path.suffix],
        filename=f"{record.id}-{name}",
        headers={"cache-control": "private, no-cache"},
    )


def routes(office: Office, errors: Any) -> APIRouter:
    """`/v1/jobs`."""
    api = APIRouter(prefix="/v1", responses=errors, route_class=StrictRoute)
    runner, whose = office.runner, Depends(office.owner)

    @api.get("/jobs")
    async def list_jobs(
        request: Request,
        owner: str = whose,
        after: str | None = None,
        limit: Limit = 20,
        order: Order = "desc",
    ) -> Jobs:
        """Jobs of this client, the newest first."""
        records, has_more = await runner.page(
            owner, after=after, limit=limit, is_newest_first=order == "desc"
        )
        data = [await status_of(office, record, request) for record in records]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return Jobs(data=data, first_id=first, last_id=last, has_more=has_more)

    @api.get("/jobs/{job_id}")
    async def get_job(job_id: str, request: Request, owner: str = whose) -> JobStatus:
        return await status_of(office, await runner.get(job_id, owner), request)

    @api.post("/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str, request: Request, owner: str = whose) -> JobStatus:
        """End a job before its next step; one that has ended stays as it is."""
        return await status_of(office, await runner.cancel(job_id, owner), request)

    @api.delete("/jobs/{job_id}")
    async def delete_job(job_id: str, owner: str = whose) -> JobDeleted:
        """Forget a job and its files; one that runs ends before its next step."""
        await runner.remove(job_id, owner)
        return JobDeleted(id=job_id)

    @api.get("/jobs/{job_id}/files/{name}", response_class=Download, responses=PARTS)
    async def get_file(job_id: str, name: str, owner: str = whose) -> Download:
        return await file_of(office, await runner.get(job_id, owner), name)

    return api
