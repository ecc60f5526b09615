"""Response models of models, single requests, and the server's state; see `schema.py`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelParameter(BaseModel):
    """One parameter of the model, as requests send it."""

    name: str
    kind: str = Field(description="int, float, bool, str, numbers or picture")
    required: bool
    default: int | float | bool | str | None = Field(description="for the first task")
    tasks: list[str] = Field(description="tasks that take it")


class ModelLimits(BaseModel):
    """Limits of one request."""

    n: int = Field(description="most images")
    num_inference_steps: int = Field(description="most denoising steps")
    pixels: int = Field(description="most pixels of an image")
    num_frames: int = Field(description="most frames of a video")
    pictures: int = Field(description="most reference pictures")


class ModelEntry(BaseModel):
    id: str = Field(description="the name for requests")
    object: Literal["model"] = "model"
    created: int = Field(description="when the server started, Unix time")
    owned_by: Literal["carpool"] = "carpool"
    pipeline: str = Field("", description="the diffusers class")
    tasks: list[str] = Field([], description="supported tasks; the first one needs no picture")
    default_size: str | None = Field(None, description="WIDTHxHEIGHT; null if the model decides")
    size_multiple_px: int = Field(1, description="both sides are multiples of it")
    parameters: list[ModelParameter] = Field([], description="parameters for requests")
    writers: list[str] = Field(
        default=[], description="components that write text: POST /v1/chat/completions, MODEL/NAME"
    )
    lora: list[str] = Field([], description="adapters that a request may name")
    schedulers: list[str] = Field([], description="samplers that a request may name")
    private: dict[str, str] = Field(
        default={}, description="why requests run alone, by task: see docs/isolation.md"
    )
    limits: ModelLimits | None = Field(
        default=None, description="limits of one request, after loading"
    )
    state: str = Field(
        default="ready", description="ready, starting, worker_lost, unloaded, draining"
    )
    ready_in_s: float | None = Field(default=None, description="predicted seconds until ready")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class PhaseReport(BaseModel):
    """One phase of an output's request. Seconds; times count from its submission."""

    phase: Literal["encode", "denoise", "decode"]
    start_s: float = Field(description="when it began")
    duration_s: float = Field(description="how long it took, waiting included")
    forwards: int = Field(description="module calls, each part of one forward")
    forward_s: float = Field(description="time in forwards")
    waited_s: float = Field(description="time until its forwards were scheduled")
    waited_for_s: dict[str, float] = Field(
        description="by reason. place_in_forward: a compatible forward was full; "
        "incompatible_forwards: same module, for example another size; other_modules; engine: the "
        "pipelines' own code"
    )
    others_mean: float = Field(description="mean number of requests that shared a forward with it")
    others_most: int = Field(description="maximum of the same")
    shared_forwards: int = Field(0, description="number of its forwards that were shared")
    others: list[str] = Field(
        description="at most 32 requests that shared a forward with it: ids for the same API "
        "key, else `another`"
    )


class MoveReport(BaseModel):
    """A running request moved to another worker at its next step."""

    model_config = ConfigDict(populate_by_name=True)

    at: float = Field(description="Unix time")
    from_: int = Field(alias="from", description="its previous worker")
    to: int | None = Field(description="the worker that continued it; null: it waits")
    why: Literal["drain", "priority"] = Field(
        description="drain: its worker stops; priority: a request of higher priority took its place"
    )


class OutputReport(BaseModel):
    """The timeline of one output. Seconds."""

    id: str = Field(description="the output's id; the first output has the request's id")
    status: Literal["queued", "running", "ok", "failed", "cancelled"]
    error: str | None = Field(description="error code")
    step: int = Field(description="finished denoising steps")
    steps: int = Field(description="total denoising steps; 0 while unknown")
    surface: float | None = Field(default=None, description="extracted share of a mesh's surface")
    skipped_steps: int = Field(default=0, description="steps that `step_cache` skipped")
    tokens: int = Field(
        default=0, description="text tokens that a model of the pipeline has written for it"
    )
    submitted_at: float = Field(description="Unix time, like all fields that end in _at")
    started_at: float | None = Field(description="admission; null while queued")
    ended_at: float | None = Field(description="end of any kind; null before")
    queued_s: float = Field(description="wait until admission")
    total_s: float = Field(description="from submission to the end, or until now")
    phases: list[PhaseReport] = Field(description="the phases begun so far, in order")
    moves: list[MoveReport] = Field(
        default=[], description="moves between workers; times are those in the last worker"
    )


class RequestReport(BaseModel):
    """`GET /v1/requests/{id}`: the timelines of an HTTP request's outputs, in their order."""

    id: str = Field(description="the header `x-request-id` of its answer")
    outputs: list[OutputReport] = Field(description="one per picture or video")


class EstimateReport(BaseModel):
    """`POST /v1/estimates`: the predicted time of a request."""

    seconds: float | None = Field(
        description="for its denoising steps, alone on the device; null while unknown"
    )
    wait_s: float = Field(description="until the waiting requests are done")
    speed: float = Field(description="current speed-up of such work by shared forwards")


class WorkerHealth(BaseModel):
    """One of several workers, or a worker that is a group of processes."""

    worker: int = Field(description="its number, from 0")
    model: str = Field(description="its model's id")
    device: str = Field(description="cpu, cuda:N, or auto; a group's devices are joined by +")
    ranks: int | None = Field(None, description="number of processes, if it is a group")
    state: str = Field(description="ready, starting, worker_lost, draining, stopped")
    error: str | None = Field(None, description="why loading fails")
    model_digest: str | None = Field(
        None, description="digest of the loaded code, weights and configuration"
    )


class Health(BaseModel):
    status: Literal["ready", "degraded", "starting", "draining", "worker_lost", "stopped"]
    workers: list[WorkerHealth] | None = Field(None, description="if there are several, or groups")
    private: dict[str, str] | None = Field(
        None, description="why requests run alone, by task: see docs/isolation.md"
    )
