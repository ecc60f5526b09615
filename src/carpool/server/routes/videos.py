"""`/v1/videos`: OpenAI's video API over jobs."""

import asyncio
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request, Response

from carpool.errors import (
    FileNotReady,
    InvalidValue,
    JobNotFound,
    LibraryMissing,
    MissingParameter,
    PipelineFailed,
    UnknownParameter,
    UnsupportedEndpoint,
    UnsupportedParameter,
    VideoNotFound,
    VideoNotReady,
    show,
)
from carpool.jobs.database import Record
from carpool.jobs.work import work_of
from carpool.media.inputs import packed
from carpool.media.outputs import FPS, MOST_FPS, encode_video, spritesheet, thumbnail
from carpool.media.reader import Intake
from carpool.request.parameters import Card, check
from carpool.server.access.keys import Client
from carpool.server.answers.downloads import PARTS, Download
from carpool.server.answers.responder import unless_gone
from carpool.server.bodies import forms
from carpool.server.bodies.forms import Form, read_body, validated
from carpool.server.bodies.schema_jobs import (
    RemixRequest,
    Video,
    VideoDeleted,
    VideoRequest,
    Videos,
)
from carpool.server.bodies.strict import WorkRoute
from carpool.server.routes.edits import pictures_of
from carpool.server.routes.images import Served, check_model, check_text, parse_size, share_of
from carpool.server.routes.jobs import (
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
from carpool.types import CheckedRequest
from carpool.types import Request as Wish
from carpool.worker.protocol import Done

FILES = {"video": "video.mp4", "thumbnail": "thumbnail.webp", "spritesheet": "spritesheet.jpg"}
POLL_MS = 500, 5000  # least and most between polls
STATUS: dict[str, Any] = {"cancelled": "failed", "expired": "failed"}  # the SDK knows no others
NOT_PASSED = {"prompt", "model", "seconds", "fps", "size", "seed", "timeout_s", "user"}
NOT_PASSED |= {"safety_identifier"}
ABSENT = {f"/videos/{name}": "POST" for name in ("edits", "extensions", "characters")}
ABSENT |= {"/videos/characters/{name}": "GET"}
"""The rest of OpenAI's API of videos."""
REFERENCE = "input_reference"  # the picture that a video begins with


async def pictures_for(
    card: Card, form: Form, body: VideoRequest, intake: Intake
) -> dict[str, Any]:
    """What a video is to begin with, as arguments of the pipeline.

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
    return await pictures_of(card, task, form, intake, is_sized=is_sized)


def make_job(
    served: Served,
    body: VideoRequest,
    max_frames: int,
    *,
    key: str = "",
    pictures: Mapping[str, Any] | None = None,
) -> tuple[CheckedRequest, dict[str, Any]]:
    """Check a body and turn it into a job, and into what clients see of it.

    Args:
        key: names the client's API key; "" where there are none.
        pictures: of `pictures_for`.

    Raises:
        Rejected, ModelNotFound: what is wrong, and the nearest thing that works.
    """
    card = served.card
    check_model(served, body.model)
    if (makes := card.tasks[0].makes) != "videos":
        ways = {"pictures": "POST /v1/images/generations makes them"}
        way = ways.get(makes, "`carpool generate` and the Python API do that")
        raise UnsupportedParameter(
            f"{served.id} makes {makes}, and this endpoint answers with videos: {way}",
            param="model",
        )
    sent = body.model_dump(exclude_none=True)
    check_text(sent)
    parameters = {name: value for name, value in sent.items() if name not in NOT_PASSED}
    if own := parameters.keys() & {"self", "request_id", "tenant"}:  # `Wish`'s own arguments
        name = min(own)
        raise UnknownParameter(f"{card.pipeline} has no parameter {name!r}", param=name)
    if "output_format" in parameters:
        raise UnsupportedParameter(
            "output_format is not taken: a video is an MP4 file", param="output_format"
        )
    parameters |= parse_size(card, body.size, parameters) | dict(pictures or {})
    own_rate = {p.name: p.default for p in card.parameters}.get("frame_rate")
    own_rate = parameters.get("frame_rate") or own_rate or FPS
    fps = rate_of("fps", body.fps) or rate_of("frame_rate", own_rate) or FPS
    if card.tasks[0].takes("frame_rate"):
        parameters["frame_rate"] = fps
    seconds = _number(body.seconds)
    if seconds is not None:
        if not 0 < seconds <= max_frames:
            rule = f"must be above 0, at most {max_frames}"
            raise InvalidValue(f"seconds={show(body.seconds)}: {rule}", param="seconds")
        if body.num_frames is not None:
            raise InvalidValue("give seconds or num_frames, not both", param="seconds")
        parameters["num_frames"] = round(seconds * fps) + 1  # models count k * n + 1
    share = share_of(key, body)
    wish = Wish(body.prompt, seed=body.seed, timeout_s=body.timeout_s, **share, **parameters)
    job = check(card, wish, from_json=True)
    own_values = {p.name: p.default for p in card.task(job.task).parameters}
    said: dict[str, Any] = {**own_values, **job.arguments}
    width, height, asked_length = (
        int(said.get(name) or 0) for name in ("width", "height", "num_frames")
    )
    length = length_of(card, said)
    if length > max_frames:
        makes_more = f" makes {length} frames" if length != asked_length else ""
        raise InvalidValue(
            f"num_frames={asked_length}{makes_more}: must be at most {max_frames} (--max-frames)",
            param="num_frames" if seconds is None else "seconds",
        )
    if length != asked_length:
        job = replace(job, arguments={**job.arguments, "num_frames": length})
    return job, {
        "model": served.id,
        "seeds": [job.seed],
        "body": sent | {"seed": job.seed},
        "size": f"{width}x{height}",
        "fps": fps,
        "num_frames": length,
    }


def length_of(card: Card, arguments: Mapping[str, Any]) -> int:
    """How many frames the video has that these arguments ask for; 0 where nobody counts them.

    Autoencoders decode k * n + 1 frames, as near to what was asked as Wan's pipeline goes. Helios
    makes whole pieces of a video, however few frames are asked for.
    """
    asked, step = int(arguments.get("num_frames") or 0), card.frame_step
    latents = arguments.get("num_latent_frames_per_chunk")
    if not asked or step == 1:
        return asked
    if isinstance(latents, int) and latents > 0:
        piece = (latents - 1) * step + 1
        return (-(-asked // piece) * piece - 1) // step * step + 1
    return asked // step * step + 1 if asked % step != 1 else asked


def rate_of(name: str, value: Any) -> float | None:
    """Frames a second; None where nobody says."""
    rate = _number(value)
    if rate is not None and not 1 <= rate <= MOST_FPS:
        raise InvalidValue(f"{name}={show(value)}: must be from 1 to {MOST_FPS}", param=name)
    return rate


def _number(value: Any) -> float | None:
    """A number, which may be written as text; NaN for anything else."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return forms.number(value)
        is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_plain else math.nan
    except (ValueError, OverflowError):
        return math.nan


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


@contextmanager
def as_videos() -> Iterator[None]:
    """What is wrong with a job, as OpenAI's clients hear it of videos."""
    try:
        yield
    except FileNotReady as error:
        raise VideoNotReady(error.message.replace("job", "video", 1)) from error
    except JobNotFound as error:
        raise VideoNotFound(error.message.replace("job", "video", 1)) from error


def routes(office: Office, errors: Any) -> APIRouter:
    """`/v1/videos`."""
    api = APIRouter(prefix="/v1", responses=errors, route_class=WorkRoute)
    runner, whose, asking = office.runner, Depends(office.owner), Depends(office.client)

    async def get(video_id: str, owner: str) -> Record:
        with as_videos():
            record = await runner.get(video_id, owner)
        if record.kind != "video":
            raise VideoNotFound(f"job {video_id} makes pictures: ask /v1/jobs/{video_id}")
        return record

    async def submit(
        request: Request, client: Client, form: Form, sent: dict[str, Any], **more: Any
    ) -> Video:
        body, served = validated(VideoRequest, form.values), office.served()
        if importlib.util.find_spec("av") is None:
            raise LibraryMissing("videos need PyAV: pip install 'carpool[video]'")
        intake = office.intake(request, client.owner)
        reading = pictures_for(served.card, form, body, intake)
        pictures = await unless_gone(request, reading)
        job, asked = make_job(served, body, office.max_frames, key=client.key, pictures=pictures)
        told = served.told(settings_of(served, job))
        names, inputs = await unless_gone(request, intake.run(partial(packed, pictures)))
        work = work_of(served.id, [job], names, fps=asked["fps"], told=told)
        work |= {"keep": list(inputs)} if inputs else {}  # for `remix_video`
        record = await accept(
            office, request, client.owner, "video", sent, asked | more, work, inputs
        )
        return await video_of(office, record)

    picture = {REFERENCE: forms.FILE}, {REFERENCE: forms.REFERENCE}

    @api.post("/videos", openapi_extra=forms.document(VideoRequest, ["prompt"], *picture))
    async def create_video(request: Request, client: Client = asking) -> Video:
        form = await read_body(request, office.served().card, REFERENCE)
        intake = office.intake(request, client.owner)
        digests = await unless_gone(request, intake.run(form.digests))
        sent = form.values | ({"pictures": digests} if digests else {})
        return await submit(request, client, form, sent)

    @api.get("/videos")
    async def list_videos(
        owner: str = whose, after: str | None = None, limit: Limit = 20, order: Order = "desc"
    ) -> Videos:
        """Videos of this client, the newest first."""
        with as_videos():
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
        with as_videos():
            await runner.remove(video_id, owner)
        return VideoDeleted(id=video_id)

    @api.get("/videos/{video_id}/content", response_class=Download, responses=PARTS)
    async def get_content(
        video_id: str,
        owner: str = whose,
        variant: Literal["video", "thumbnail", "spritesheet"] = "video",
    ) -> Download:
        record = await get(video_id, owner)
        with as_videos():
            return await file_of(office, record, FILES[variant])

    @api.post("/videos/{video_id}/remix")
    async def remix_video(
        video_id: str, body: RemixRequest, request: Request, client: Client = asking
    ) -> Video:
        """The same video with another prompt, from the same seed."""
        source = await get(video_id, client.owner)
        form = Form(source.asked["body"] | {"prompt": body.prompt}, name=REFERENCE)
        for name, _ in source.work.get("inputs", {}).get("image", []):
            picture = await asyncio.to_thread(runner.store.input, video_id, name)
            if picture is None:
                raise FileNotReady(f"the picture that {video_id} began with is not kept any more")
            form.images.append(picture)
        return await submit(request, client, form, body.model_dump(), remixed_from=video_id)

    async def refuse(request: Request, owner: str = whose) -> None:
        rule = "POST /v1/videos/{id}/remix makes a video anew with another prompt, and POST "
        rule += f"/v1/videos one that begins with a picture, its {REFERENCE}"
        raise UnsupportedEndpoint(f"{request.url.path} is not supported: {rule}")

    for path in ABSENT:
        api.add_api_route(path, refuse, methods=[ABSENT[path]], include_in_schema=False)
    return api
