"""`/v1/videos`: OpenAI's video API, implemented with jobs."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from fastapi import Response

from carpool import errors
from carpool.jobs.database import Record
from carpool.media.metadata import with_used
from carpool.media.outputs import FPS, spritesheet, thumbnail, write_mp4
from carpool.server.bodies import forms
from carpool.server.bodies.input_images import REFERENCE, reference_images
from carpool.server.bodies.schema import RemixRequest, VideoRequest
from carpool.server.bodies.schema_jobs import Deleted, Page, Video
from carpool.server.dependencies import Context, WorkRoute, router_of
from carpool.server.openai_fields import video_request
from carpool.server.requests import read_form
from carpool.server.responses.downloads import PARTS, Download, warnings_header
from carpool.server.responses.stage_metrics import peak_memory_mb, stage_durations
from carpool.server.routes import jobs
from carpool.server.state import AppState, AuthenticatedRequest
from carpool.types import Timings
from carpool.worker.protocol import Done

FILES = {"video": "video.mp4", "thumbnail": "thumbnail.webp", "spritesheet": "spritesheet.jpg"}
POLL_MS = 500, 5000  # range of the poll interval
STATUS: dict[str, Any] = {"cancelled": "failed", "expired": "failed"}  # the SDK's only failed state
UNSUPPORTED = {f"/videos/{name}": "POST" for name in ("edits", "extensions", "characters")}
UNSUPPORTED |= {"/videos/characters/{name}": "GET"}
"""The unsupported paths of OpenAI's video API."""

router = router_of(WorkRoute, "/v1")


def write_video(record: Record, outputs: Sequence[Done], folder: Path) -> None:
    """Write the files of a video job: MP4, thumbnail, sprite sheet."""
    [clip] = [output.clip for output in outputs]
    if clip is None:
        raise errors.PipelineFailed("the pipeline gave no video")
    output = record.work["output"]
    path = folder / FILES["video"]
    pixels = np.frombuffer(clip.rgb, np.uint8).reshape(clip.length, clip.height, clip.width, 3)
    audio = (clip.sound.samples, clip.sound.rate) if clip.sound else None
    metadata = with_used(output["told"], {**outputs[0].settings, "fps": output["fps"]})
    write_mp4(pixels, output["fps"], audio, path, metadata=metadata)
    (folder / FILES["thumbnail"]).write_bytes(thumbnail(path))
    (folder / FILES["spritesheet"]).write_bytes(spritesheet(path))


async def _video(state: AppState, record: Record) -> Video:
    """A job in OpenAI's format."""
    data = record.asked
    body, fps, length = data.get("body", {}), data.get("fps", FPS), data.get("num_frames", 0)
    fields = await jobs.common_fields(state, record)
    if record.state != "completed":
        fields["completed_at"] = None
    if record.state == "completed" and record.started_s is not None and record.ended_s:
        took_s = round(max(record.ended_s - record.started_s, 0.0), 3)
        fields["inference_time_s"] = took_s
        fields["stage_durations"] = {"stage_0_gen_ms": round(1000 * took_s)}
        if record.timings is not None:
            fields["stage_durations"] = stage_durations(Timings(**record.timings))
    return Video(
        status=STATUS.get(record.state, record.state), size=data.get("size", ""),
        seconds=str(body.get("seconds", f"{length / fps:.4g}")), prompt=body.get("prompt", ""),
        remixed_from_video_id=data.get("remixed_from"), fps=fps, num_frames=length,
        seed=body.get("seed", 0), settings=jobs.settings_of(record), **fields,
    )  # fmt: skip


async def _video_with_memory(state: AppState, record: Record) -> Video:
    """The same, with the peak memory of a completed video; lists skip this call to the worker."""
    video = await _video(state, record)
    if video.status == "completed":
        video.peak_memory_mb = await peak_memory_mb(state, video.model)
    return video


@contextmanager
def _video_errors() -> Iterator[None]:
    """Map errors of jobs to OpenAI's errors of videos."""
    try:
        yield
    except errors.FileNotReady as error:
        raise errors.VideoNotReady(error.message.replace("job", "video", 1)) from error
    except errors.JobNotFound as error:
        raise errors.VideoNotFound(error.message.replace("job", "video", 1)) from error


async def _get(video_id: str, context: AuthenticatedRequest) -> Record:
    with _video_errors():
        record = await context.state.runner.get(video_id, context.client.owner)
    if record.kind != "video":
        raise errors.VideoNotFound(f"job {video_id} makes no video: ask /v1/jobs/{video_id}")
    return record


async def _submit(
    context: AuthenticatedRequest, form: forms.Form, content: dict[str, Any], **extra: Any
) -> Record:
    body = forms.validated(VideoRequest, form.values)
    model = await context.model_of(body, "restarting")
    if importlib.util.find_spec("av") is None:
        raise errors.LibraryMissing("videos need PyAV: pip install av")
    reading = reference_images(model.card, form, body, context.intake())
    pictures = await context.unless_disconnected(reading)
    client, max_frames = context.client, context.state.settings.max_frames
    checked, fields = video_request(model, body, max_frames, client=client, pictures=pictures)
    return await jobs.submit(
        context, "video", content, fields | extra, [checked], pictures,
        keeps_inputs=True,  # `remix_video` reads them
        fps=fields["fps"], told=model.file_metadata(checked),
    )  # fmt: skip


_BODY = forms.document(
    VideoRequest, ["prompt"], {REFERENCE: forms.FILE}, {REFERENCE: forms.REFERENCE}
)


@router.post("/videos", openapi_extra=_BODY)
async def create_video(context: Context) -> Video:
    """Make a video; answers with a job to poll."""
    return await _video(context.state, await _create(context))


async def _create(context: AuthenticatedRequest) -> Record:
    form = await read_form(context, "restarting", REFERENCE, "image_reference")
    if form.values.pop("n", 1) not in (1, None):
        rule = "a request makes one video, send several"
        raise errors.UnsupportedParameter(f"num_outputs_per_prompt: {rule}", param="n")
    digests = await context.unless_disconnected(context.intake().run(form.digests))
    content = form.values | ({"pictures": digests} if digests else {})
    return await _submit(context, form, content)


@router.post("/videos/sync", response_class=Download, openapi_extra=_BODY)
async def create_video_at_once(context: Context) -> Download:
    """Make a video and answer with the MP4 file; a disconnect cancels the request.

    The headers `x-video-id`, `x-model`, `x-inference-time-s`, `x-stage-durations`,
    `x-peak-memory-mb` and `x-warnings` (a JSON list) describe it.
    """
    state = context.state
    record = await jobs.wait_for_end(context, await _create(context))
    answer = await jobs.file_of(state, record, FILES["video"])
    video = await _video_with_memory(state, record)
    answer.headers["x-video-id"], answer.headers["x-model"] = video.id, quote(video.model)
    answer.headers["x-inference-time-s"] = f"{video.inference_time_s or 0:.3f}"
    answer.headers["x-stage-durations"] = json.dumps(video.stage_durations or {})
    answer.headers.update(warnings_header(video.warnings))
    answer.headers["x-peak-memory-mb"] = f"{video.peak_memory_mb or 0:.3f}"
    return answer


@router.get("/videos")
async def list_videos(context: Context, part: jobs.PageQuery) -> Page[Video]:
    """List this client's videos, newest first."""
    owner = context.client.owner
    with _video_errors():
        records, has_more = await context.state.runner.page(owner, kind="video", **part)
    return Page[Video].of([await _video(context.state, record) for record in records], has_more)


@router.get("/videos/{video_id}", description="The state of a video.")
async def get_video(video_id: str, response: Response, context: Context) -> Video:
    video = await _video_with_memory(context.state, await _get(video_id, context))
    low, high = POLL_MS
    wait_ms = 2 * low if video.eta_s is None else 1000 * video.eta_s / 20
    response.headers["openai-poll-after-ms"] = str(round(min(max(wait_ms, low), high)))
    return video


@router.delete("/videos/{video_id}")
async def delete_video(video_id: str, context: Context) -> Deleted:
    """Delete a video and its files; a running job stops before its next step."""
    await _get(video_id, context)
    with _video_errors():
        await context.state.runner.remove(video_id, context.client.owner)
    return Deleted(id=video_id, object="video.deleted")


@router.get("/videos/{video_id}/content", response_class=Download, responses=PARTS)
async def get_content(
    video_id: str, context: Context, variant: Literal["video", "thumbnail", "spritesheet"] = "video"
) -> Download:
    """Download a file of a video."""
    record = await _get(video_id, context)
    with _video_errors():
        return await jobs.file_of(context.state, record, FILES[variant])


@router.post("/videos/{video_id}/remix")
async def remix_video(video_id: str, body: RemixRequest, context: Context) -> Video:
    """Repeat a video with another prompt and the same seed."""
    source, store = await _get(video_id, context), context.state.runner.store
    form = forms.Form(source.asked["body"] | {"prompt": body.prompt}, name=REFERENCE)
    for name, _ in source.work.get("inputs", {}).get("image", []):
        picture = await asyncio.to_thread(store.input, video_id, name)
        if picture is None:
            raise errors.FileNotReady(
                f"the picture of {video_id} is no longer kept: make a new video"
            )
        form.images.append(picture)
    record = await _submit(context, form, body.model_dump(), remixed_from=video_id)
    return await _video(context.state, record)


async def _refuse(context: Context) -> None:
    rule = "POST /v1/videos/{id}/remix remakes a video with another prompt, and POST "
    rule += f"/v1/videos one that begins with a picture, its {REFERENCE}"
    raise errors.UnsupportedEndpoint(f"{context.request.url.path} is not supported: {rule}")


for _path, _method in UNSUPPORTED.items():
    router.add_api_route(_path, _refuse, methods=[_method], include_in_schema=False)
