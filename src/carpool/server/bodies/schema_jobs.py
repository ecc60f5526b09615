"""What goes over HTTP about jobs and videos, as pydantic models; see `schema.py`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from carpool.server.bodies.schema import Name, Prompt, ours


class VideoRequest(BaseModel):
    """`POST /v1/videos`, as JSON or as a form.

    Any other parameter of the pipeline's `__call__` may be sent too: `GET /v1/models` lists them.
    In a form, numbers are written as text and lists as JSON.
    """

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "examples": [{"prompt": "a red circle moving right on a blue background"}]
        },
    )

    prompt: Prompt
    model: str | None = Field(None, description="the served model's id; default: that model")
    seconds: Any = ours("string", "how long it is to be; instead of num_frames")
    fps: Any = ours("number", "frames a second, 1 to 240; default: the model's own, or 16")
    num_frames: Any = ours(
        "integer", "frames in all, made k * n + 1 as the model counts; instead of seconds"
    )
    size: str | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto")
    seed: Any = ours("integer", "0 to 2**63 - 1; drawn and reported when absent")
    timeout_s: Any = ours("number", "expire when it is not done in so many seconds")
    priority: Any = ours("integer", "-10 to 10; higher goes first among those that run")
    num_inference_steps: Any = ours("integer", "denoising steps")
    guidance_scale: Any = ours("number", "how closely to follow the prompt")
    guidance_scale_2: Any = ours("number", "the same of a second denoiser")
    negative_prompt: Any = ours("string", "what not to show")
    user: Name = None
    safety_identifier: Name = None


class RemixRequest(BaseModel):
    """`POST /v1/videos/{id}/remix`: the same video with another prompt, from the same seed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Prompt


class JobError(BaseModel):
    code: str
    message: str
    param: str | None
    type: str


class Video(BaseModel):
    """A video's job. Moments are Unix time, seconds."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(description="percent of its denoising steps; 100 once the file is there")
    created_at: int
    completed_at: int | None
    expires_at: int | None = Field(description="when its files are removed")
    size: str
    seconds: str
    prompt: str
    error: JobError | None
    remixed_from_video_id: str | None
    fps: float
    num_frames: int
    seed: int
    queue_position: int | None = Field(description="jobs that were accepted before it and wait")
    eta_s: float | None


class Videos(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class JobFile(BaseModel):
    name: str
    bytes: int
    url: str = Field(description="path of this server")


class JobStatus(BaseModel):
    """Any job. Moments are Unix time, seconds."""

    id: str
    object: Literal["job"] = "job"
    kind: Literal["image", "video"]
    model: str
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
    progress: int = Field(
        description="percent of its denoising steps; 100 once its files are there"
    )
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None = Field(description="when it is forgotten")
    seeds: list[int]
    files: list[JobFile]
    error: JobError | None
    queue_position: int | None = Field(description="jobs that were accepted before it and wait")
    eta_s: float | None


class Jobs(BaseModel):
    object: Literal["list"] = "list"
    data: list[JobStatus]
    first_id: str | None
    last_id: str | None
    has_more: bool


class JobDeleted(BaseModel):
    id: str
    object: Literal["job.deleted"] = "job.deleted"
    deleted: bool = True
