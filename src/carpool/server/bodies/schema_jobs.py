"""Response models of jobs, videos and meshes; see `schema.py`."""

from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, Field


class JobError(BaseModel):
    code: str
    message: str
    param: str | None
    type: str


class Delivery(BaseModel):
    state: Literal["waiting", "delivered", "failed"]
    attempts: int
    error: str | None = Field(description="error of the last attempt")
    url: str | None = Field(None, description="the webhook's URL")
    files: list[str] | None = Field(None, description="URLs of the copies")


class JobRecord(BaseModel):
    """The fields of any job. Moments are Unix time, seconds."""

    id: str
    model: str
    progress: int = Field(description="percent of steps done; 100 once its files exist")
    created_at: int
    completed_at: int | None
    expires_at: int | None = Field(description="when the job and its files are deleted")
    error: JobError | None
    queue_position: int | None = Field(description="waiting jobs ahead of it")
    eta_s: float | None = Field(description="predicted seconds until its end")
    warnings: list[str] | None = Field(
        default=None, description="for example: the prompt was truncated"
    )
    skipped_steps: list[int] | None = Field(
        default=None,
        description="denoising steps without a forward for each output, with `step_cache`",
    )
    revised_prompt: str | None = Field(default=None, description="the first prompt after rewriting")
    deliveries: dict[Literal["upload", "webhook"], Delivery] | None = Field(
        default=None, description="its upload and its webhook, after its end"
    )


class Video(JobRecord):
    """A video's job. Moments are Unix time, seconds."""

    object: Literal["video"] = "video"
    status: Literal["queued", "in_progress", "completed", "failed"]
    size: str
    seconds: str
    prompt: str
    remixed_from_video_id: str | None
    fps: float
    num_frames: int
    seed: int
    settings: dict[str, Any] = Field(description="as `GET /v1/jobs/{id}` has them")
    inference_time_s: float | None = Field(None, description="seconds of its last run")
    stage_durations: dict[str, float] | None = Field(
        None, description="seconds of each phase; stage_0_gen_ms: milliseconds without the queue"
    )
    peak_memory_mb: float | None = Field(
        None, description="peak memory of the device; null in lists and if unknown"
    )


class MeshJob(JobRecord):
    """A mesh's job. Moments are Unix time, seconds."""

    object: Literal["mesh"] = "mesh"
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
    prompt: str
    output_format: str
    bytes: int | None = Field(description="size of its file; null until it exists")
    url: str | None = Field(description="path to its file that works for an hour without a key")
    seed: int
    settings: dict[str, Any] = Field(description="as `GET /v1/jobs/{id}` has them")


class JobFile(BaseModel):
    name: str
    bytes: int
    url: str = Field(description="path on this server")
    signed_url: str = Field(description="path that works for an hour without a key")


class JobStatus(JobRecord):
    """Any job. Moments are Unix time, seconds."""

    object: Literal["job"] = "job"
    kind: Literal["image", "video", "mesh", "sound"]
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
    started_at: int | None
    seeds: list[int]
    files: list[JobFile]
    settings: dict[str, Any] = Field(
        description="the request's parameters; after completion all parameters as used, and the "
        "server's settings in `engine`; without pictures"
    )
    task: str = Field(description="one of the model's `tasks`")


Item = TypeVar("Item", bound=JobRecord)


class Page(BaseModel, Generic[Item]):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def model_parametrized_name(cls, params: Any) -> str:
        return f"{params[0].__name__}List"

    @classmethod
    def of(cls, data: list[Item], has_more: bool) -> Self:
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=has_more)


class Deleted(BaseModel):
    id: str
    object: Literal["job.deleted", "video.deleted", "mesh.deleted"]
    deleted: bool = True
