"""`/v1/videos`: OpenAI's video API over jobs."""

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse

from carpool.errors import (
    FileNotReady,
    InvalidValue,
    LibraryMissing,
    MissingParameter,
    PipelineFailed,
    UnknownParameter,
    UnsupportedParameter,
)
from carpool.frames import Done
from carpool.jobs.database import Record
from carpool.jobs.runner import work_of
from carpool.media.inputs import packed
from carpool.media.outputs import encode_video, spritesheet, thumbnail
from carpool.parameters import Card, check
from carpool.server import forms
from carpool.server.edits import pictures_of
from carpool.server.forms import Form, read_body, validated
from carpool.server.images import Served, check_model, check_text, parse_size
from carpool.server.jobs import (
    Limit,
    Office,
    Order,
    accept,
    error_of,
    expiry_of,
    file_of,
    outlook,
    settings_of,
)
from carpool.server.schema_jobs import RemixRequest, Video, VideoDeleted, VideoRequest, Videos
from carpool.server.strict import StrictRoute
from carpool.types import Job
from carpool.types import Request as Wish

FILES = {"video": "video.mp4", "thumbnail": "thumbnail.webp", "spritesheet": "spritesheet.jpg"}
FPS = 16.0  # where neither the request nor the model says
MOST_FPS = 240
POLL_MS = 500, 5000  # least and most between polls
STATUS: dict[str, Any] = {"cancelled": "failed", "expired": "failed"}  # the SDK knows no others
NOT_PASSED = {"prompt", "model", "seconds", "fps", "size", "seed", "timeout_s", "user"}
NOT_PASSED |= {"safety_identifier"}
REFERENCE = "input_reference"  # the picture that a video begins with


async def pictures_for(
    card: Card, form: Form, body: VideoRequest, *, allow_remote: bool
) -> dict[str, Any]:
    """What a video is to begin with, as arguments of the pipeline.

    Args:
        allow_remote: fetch it if it is named by URL.

    Raises:
        CarpoolError: the model begins with none, needs one, or it is not as it has to be.
    """
    if (task := card.task_for(["image"])).makes != "videos":
        return {}  # `make_job` refuses
    if not form.images:
        if any(one.name == "image" and one.required for one in card.parameters):
            rule = f"{card.id} does {card.tasks[0].name}, send the picture as a file"
            raise MissingParameter(f"{REFERENCE} is missing: {rule}", param=REFERENCE)
        return {}
    if not task.takes("image"):
        does = ", ".join(one.name for one in card.tasks)
        raise UnsupportedParameter(
            f"{REFERENCE} is not taken: {card.id} does {does}", param=REFERENCE
        )
    extra = body.model_extra or {}
    sizes = body.size, extra.get("width"), extra.get("height")
    is_sized = any(one not in (None, "auto") for one in sizes)
    return await pictures_of(card, task, form, is_sized=is_sized, allow_remote=allow_remote)


def make_job(
    served: Served,
    body: VideoRequest,
    max_frames: int,
    *,
    tenant: str = "",
    pictures: Mapping[str, Any] | None = None,
) -> tuple[Job, dict[str, Any]]:
    """Check a body and turn it into a job, and into what clients see of it.

    Args:
        pictures: of `pictures_for`.

    Raises:
        Rejected, ModelNotFound: what is wrong, and the nearest thing that works.
    """
    card = served.card
    check_model(served, body.model)
    if (makes := card.tasks[0].makes) != "videos":
        raise UnsupportedParameter(
            f"{served.id} makes {makes}, and this endpoint answers with videos", param="model"
        )
    sent = body.model_dump(exclude_none=True)
    check_text(sent)
    parameters = {name: value for name, value in sent.items() if name not in NOT_PASSED}
    if own := parameters.keys() & {"self", "request_id", "tenant"}:  # `Wish`'s own arguments
        name = min(own)
        raise UnknownParameter(f"{card.pipeline} has no parameter {name!r}", param=name)
    parameters |= parse_size(body.size, parameters) | dict(pictures or {})
    own_rate = {p.name: p.default for p in card.parameters}.get("frame_rate")
    own_rate = parameters.get("frame_rate") or own_rate or FPS
    fps = _number("fps", body.fps, MOST_FPS) or _number("frame_rate", own_rate, MOST_FPS) or FPS
    if card.tasks[0].takes("frame_rate"):
        parameters["frame_rate"] = fps
    seconds = _number("seconds", body.seconds, max_frames)
    if seconds is not None:
        if body.num_frames is not None:
            raise InvalidValue("give seconds or num_frames, not both", param="seconds")
        parameters["num_frames"] = round(seconds * fps) + 1  # models count k * n + 1
    wish = Wish(body.prompt, seed=body.seed, timeout_s=body.timeout_s, tenant=tenant, **parameters)
    job = check(card, wish, from_json=True)
    defaults = {p.name: p.default for p in card.task(job.task).parameters}
    width, height, length = (
        int(job.arguments.get(name) or defaults.get(name) or 0)
        for name in ("width", "height", "num_frames")
    )
    if length > max_frames:
        raise InvalidValue(
            f"num_frames={length}: must be at most {max_frames} (--max-frames)",
            param="num_frames" if seconds is None else "seconds",
        )
    return job, {
        "model": served.id,
        "seeds": [job.seed],
        "body": sent | {"seed": job.seed},
        "size": f"{width}x{height}",
        "fps": fps,
        "num_frames": length,
    }


def _number(name: str, value: Any, most: float) -> float | None:
    """A number above 0, which may be written as text."""
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, (str, int, float)) else 0.0
    except (ValueError, OverflowError):
        number = 0.0
    if not 0 < number <= most or isinstance(value, bool):
        seen = repr(value)[:40]
        raise InvalidValue(f"{name}={seen}: must be above 0, at most {most}", param=name)
    return number


def write_video(record: Record, done: Sequence[Done], folder: Path) -> None:
    """The files of a video's job: the MP4, and its small pictures."""
    [clip] = [one.clip for one in done]
    if clip is None:
        raise PipelineFailed("the pipeline gave no video")
    output = record.work["output"]
    path = folder / FILES["video"]
    pixels = np.frombuffer(clip.rgb, np.uint8).reshape(clip.length, clip.height, clip.width, 3)
    audio = None
    if clip.rate:
        audio = np.frombuffer(clip.sound, np.float32).reshape(clip.channels, -1), clip.rate
    encode_video(pixels, output["fps"], audio, path, metadata=output["told"])
    (folder / FILES["thumbnail"]).write_bytes(thumbnail(path))
    (folder / FILES["spritesheet"]).write_bytes(spritesheet(path))


async def video_of(office: Office, record: Record) -> Video:
    """A job in OpenAI's words."""
    asked = record.asked
    body, fps, length = asked.get("body", {}), asked.get("fps", FPS), asked.get("num_frames", 0)
    place, eta_s = await outlook(office, record)
    return Video(
        id=record.id,
        model=asked.get("model", ""),
        status=STATUS.get(record.state, record.state),
        progress=record.progress,
        created_at=int(record.created_s),
        completed_at=int(record.ended_s or 0) if record.state == "completed" else None,
        expires_at=expiry_of(office, record),
        size=asked.get("size", ""),
        seconds=str(body.get("seconds", f"{length / fps:.4g}")),
        prompt=body.get("prompt", ""),
        error=error_of(record),
        remixed_from_video_id=asked.get("remixed_from"),
        fps=fps,
        num_frames=length,
        seed=body.get("seed", 0),
        queue_position=place,
        eta_s=eta_s,
    )


def routes(office: Office, errors: Any) -> APIRouter:
    """`/v1/videos`."""
    api = APIRouter(prefix="/v1", responses=errors, route_class=StrictRoute)
    runner, whose = office.runner, Depends(office.owner)

    async def get(video_id: str, owner: str) -> Record:
        record = await runner.get(video_id, owner)
        if record.kind != "video":
            raise FileNotReady(f"job {video_id} makes pictures: ask /v1/jobs/{video_id}")
        return record

    async def submit(
        request: Request, owner: str, form: Form, sent: dict[str, Any], **more: Any
    ) -> Video:
        body, served = validated(VideoRequest, form.values), office.served()
        if importlib.util.find_spec("av") is None:
            raise LibraryMissing("videos need PyAV: pip install 'carpool[video]'")
        tenant = body.safety_identifier or body.user or owner
        remote = office.allow_remote
        pictures = await pictures_for(served.card, form, body, allow_remote=remote)
        job, asked = make_job(served, body, office.max_frames, tenant=tenant, pictures=pictures)
        told = served.told(settings_of(served, job))
        names, inputs = await asyncio.to_thread(packed, pictures)
        work = work_of(served.id, [job], names, fps=asked["fps"], told=told)
        work |= {"keep": list(inputs)} if inputs else {}  # for `remix_video`
        record = await accept(office, request, owner, "video", sent, asked | more, work, inputs)
        return await video_of(office, record)

    picture = {REFERENCE: forms.FILE}, {REFERENCE: forms.REFERENCE}

    @api.post("/videos", openapi_extra=forms.document(VideoRequest, ["prompt"], *picture))
    async def create_video(request: Request, owner: str = whose) -> Video:
        form = await read_body(request, office.served().card, REFERENCE)
        digests = await asyncio.to_thread(form.digests)
        sent = form.values | ({"pictures": digests} if digests else {})
        return await submit(request, owner, form, sent)

    @api.get("/videos")
    async def list_videos(
        owner: str = whose, after: str | None = None, limit: Limit = 20, order: Order = "desc"
    ) -> Videos:
        """Videos of this client, the newest first."""
        records, has_more = await runner.page(
            owner, kind="video", after=after, limit=limit, is_newest_first=order == "desc"
        )
        data = [await video_of(office, record) for record in records]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return Videos(data=data, first_id=first, last_id=last, has_more=has_more)

    @api.get("/videos/{video_id}")
    async def get_video(video_id: str, response: Response, owner: str = whose) -> Video:
        video = await video_of(office, await get(video_id, owner))
        least, most = POLL_MS
        wait_ms = 2 * least if video.eta_s is None else 1000 * video.eta_s / 20
        response.headers["openai-poll-after-ms"] = str(round(min(max(wait_ms, least), most)))
        return video

    @api.delete("/videos/{video_id}")
    async def delete_video(video_id: str, owner: str = whose) -> VideoDeleted:
        """Forget a video and its files; one that is being made ends before its next step."""
        await get(video_id, owner)
        await runner.remove(video_id, owner)
        return VideoDeleted(id=video_id)

    @api.get("/videos/{video_id}/content", response_class=FileResponse)
    async def get_content(
        video_id: str,
        owner: str = whose,
        variant: Literal["video", "thumbnail", "spritesheet"] = "video",
    ) -> FileResponse:
        return await file_of(office, await get(video_id, owner), FILES[variant])

    @api.post("/videos/{video_id}/remix")
    async def remix_video(
        video_id: str, body: RemixRequest, request: Request, owner: str = whose
    ) -> Video:
        """The same video with another prompt, from the same seed."""
        source = await get(video_id, owner)
        form = Form(source.asked["body"] | {"prompt": body.prompt}, name=REFERENCE)
        for name, _ in source.work.get("inputs", {}).get("image", []):
            picture = await asyncio.to_thread(runner.store.input, video_id, name)
            if picture is None:
                raise FileNotReady(f"the picture that {video_id} began with is not kept any more")
            form.images.append(picture)
        return await submit(request, owner, form, body.model_dump(), remixed_from=video_id)

    return api
