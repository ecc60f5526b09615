"""Response models of models, single requests, and the server's state; see `schema.py`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelParameter(BaseModel):
    """One parameter of the model, as a request writes it."""

    name: str
    kind: str = Field(description="int, float, bool, str, numbers or picture")
    required: bool
    default: int | float | bool | str | None = Field(description="of the task that is named first")
    tasks: list[str] = Field(description="those of the model that take it")


class ModelLimits(BaseModel):
    """The most that one request may ask for."""

    n: int = Field(description="images")
    num_inference_steps: int = Field(description="denoising steps")
    pixels: int = Field(description="of an image")
    num_frames: int = Field(description="of a video")
    pictures: int = Field(description="reference pictures of a request")


class ModelEntry(BaseModel):
    id: str = Field(description="what requests name it by")
    object: Literal["model"] = "model"
    created: int = Field(description="when the server started, Unix time")
    owned_by: Literal["carpool"] = "carpool"
    pipeline: str = Field("", description="the diffusers class")
    tasks: list[str] = Field(
        [], description="what it does; the first one without any picture given"
    )
    default_size: str | None = Field(None, description="WIDTHxHEIGHT; null where the model decides")
    size_multiple_px: int = Field(1, description="both sides are multiples of it")
    parameters: list[ModelParameter] = Field([], description="what requests may say")
    writers: list[str] = Field(
        default=[], description="components that write texts: POST /v1/chat/completions, MODEL/NAME"
    )
    lora: list[str] = Field([], description="adapters that a request may name")
    schedulers: list[str] = Field([], description="samplers that a request may name")
    private: dict[str, str] = Field(
        default={}, description="why requests ride alone, by task: see docs/isolation.md"
    )
    limits: ModelLimits | None = Field(
        default=None, description="the most that one request may ask for, once it is loaded"
    )
    state: str = Field(
        default="ready", description="ready, starting, worker_lost, unloaded, draining"
    )
    ready_in_s: float | None = Field(default=None, description="predicted seconds, while it is not")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class PhaseReport(BaseModel):
    """One phase of an output's request. Seconds; moments since its submission."""

    phase: Literal["encode", "denoise", "decode"]
    start_s: float = Field(description="when it began")
    duration_s: float = Field(description="how long it took, waiting included")
    forwards: int = Field(description="module calls of it, each part of one forward")
    forward_s: float = Field(description="in forwards")
    waited_s: float = Field(description="for its forwards to be scheduled")
    waited_for_s: dict[str, float] = Field(
        description="place_in_forward: forwards it fitted, had they been wider; "
        "incompatible_forwards: of its module, of other sizes, say; other_modules; engine: "
        "pipelines' own code"
    )
    others_mean: float = Field(description="requests that shared a forward with it")
    others_most: int = Field(description="the same, of its widest forward")
    shared_forwards: int = Field(0, description="of its forwards, how many others shared")
    others: list[str] = Field(
        description="ids of requests that shared a forward with it, at most 32: `id` for those of "
        "the same API key, else only that there was one: `another`"
    )


class MoveReport(BaseModel):
    """A running request went on at its next step in another worker."""

    model_config = ConfigDict(populate_by_name=True)

    at: float = Field(description="Unix time")
    from_: int = Field(alias="from", description="the worker that gave it up")
    to: int | None = Field(description="the worker that went on with it; null: it waits for one")
    why: Literal["drain", "gain", "priority"] = Field(
        description="its worker was to end; requests end sooner in sum; somebody of higher "
        "priority took its place"
    )


class OutputReport(BaseModel):
    """The timeline of one output. Seconds."""

    id: str = Field(description="its own; that of the first is the request's")
    status: Literal["queued", "running", "ok", "failed", "cancelled"]
    error: str | None = Field(description="the code of what it failed with")
    step: int = Field(description="denoising steps that are done")
    steps: int = Field(description="denoising steps in all; 0 while that is not known")
    skipped_steps: int = Field(default=0, description="those that `step_cache` answered")
    tokens: int = Field(
        default=0,
        description="of text that it has let a model of the pipeline write: a plan, a prompt",
    )
    submitted_at: float = Field(description="Unix time, as the other moments that end in _at")
    started_at: float | None = Field(description="admitted; null while it is queued")
    ended_at: float | None = Field(description="answered, failed or cancelled; null before")
    queued_s: float = Field(description="waited until it was admitted")
    total_s: float = Field(description="from submission to its end, or until now")
    phases: list[PhaseReport] = Field(description="those that it has begun, in order")
    moves: list[MoveReport] = Field(
        default=[], description="between workers, while it ran; times are of the last worker's run"
    )


class RequestReport(BaseModel):
    """`GET /v1/requests/{id}`: the timelines of an HTTP request's outputs, in their order."""

    id: str = Field(description="as the header `x-request-id` of its answer had it")
    outputs: list[OutputReport] = Field(description="one for each picture or video it asks for")


class EstimateReport(BaseModel):
    """`POST /v1/estimates`: what a request would take if it came now."""

    seconds: float | None = Field(
        description="of its denoising steps, alone on the device; null while too little is known"
    )
    wait_s: float = Field(description="until the requests that wait now are done")
    speed: float = Field(description="how much faster shared forwards do such work just now")


class WorkerHealth(BaseModel):
    """One of several workers, or one that is a group."""

    worker: int = Field(description="its number, from 0")
    model: str = Field(description="its model's id")
    device: str = Field(description="cpu, cuda:N, or auto; of a group: those of all, with +")
    ranks: int | None = Field(None, description="processes that compute together, if it is a group")
    state: str = Field(description="ready, starting, worker_lost, draining, stopped")
    error: str | None = Field(None, description="why it cannot be loaded")
    model_digest: str | None = Field(
        None, description="tells code, weights and configuration that it loaded from others"
    )


class Health(BaseModel):
    status: Literal["ready", "degraded", "starting", "draining", "worker_lost", "stopped"]
    workers: list[WorkerHealth] | None = Field(None, description="where several, or groups")
    private: dict[str, str] | None = Field(
        None, description="why requests ride alone, by task: see docs/isolation.md"
    )
