"""Bodies of requests for meshes and sound, and their answers; see `schema.py`."""

from typing import Any, Literal

from pydantic import Field

from carpool.media.mesh import MeshFormat
from carpool.media.sound import SoundFormat
from carpool.server.bodies.schema import GenerationRequest, Prompt, ours
from carpool.server.bodies.schema_jobs import JobRecord


class MeshRequest(GenerationRequest):
    """`POST /v1/meshes`, as JSON or as a form; a picture is sent as `input_reference`.

    Any other parameter of the pipeline's `__call__` may be sent too: `GET /v1/models` lists them.
    """

    prompt: Prompt = ""
    output_format: MeshFormat = Field(
        "glb", description="for obj and ply, a texture is a separate file of the job"
    )


class SoundRequest(GenerationRequest):
    """`POST /v1/audio/generations`.

    Any other parameter of the pipeline's `__call__` may be sent too: `GET /v1/models` lists them.
    """

    seconds: Any = ours("number", "duration; default: the model's")
    output_format: SoundFormat = Field("wav", description="flac and mp3 need PyAV")
    background_job: bool | None = Field(
        False, description="answer 202 at once, with a job to poll at /v1/jobs/{id}"
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
