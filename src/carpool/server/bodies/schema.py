"""Bodies of requests and answers as pydantic models, which also make the OpenAPI document.

Fields have OpenAI's names where OpenAI has one, otherwise diffusers'. As in Python,
`carpool.request.parameters` checks the values of the pipeline's own parameters; their types here
only document them.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from carpool.errors import InvalidValue
from carpool.media.mesh import MeshFormat
from carpool.media.sound import SoundFormat
from carpool.request.rules import MOST_TEXT
from carpool.types import Timings


def ours(type_: str, description: str, default: Any = None) -> Any:
    """A field that accepts any value, documented with a type; `parameters.check` validates it."""
    schema: dict[str, Any] = {"anyOf": [{"type": type_}, {"type": "null"}]}
    return Field(default, description=description, json_schema_extra=schema)


def _example(prompt: str, **fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [{"prompt": prompt, **fields}]})


def _single(prompt: Any) -> Any:
    if isinstance(prompt, list):
        rule = "send one request for each prompt, as a video is made of one"
        raise InvalidValue(f"prompt is a list of {len(prompt)}: {rule}", param="prompt")
    return prompt


def _one_or_several(prompt: Any, validated: ValidatorFunctionWrapHandler) -> Any:
    return [validated(text) for text in prompt] if isinstance(prompt, list) else validated(prompt)


Prompt = Annotated[str, Field(max_length=MOST_TEXT), BeforeValidator(_single)]
_TEXT = {"type": "string", "maxLength": MOST_TEXT}
Prompts = Annotated[  # a text, or a list of texts
    str,
    Field(max_length=MOST_TEXT),
    WrapValidator(_one_or_several),
    PlainSerializer(lambda prompts: prompts),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
SETTINGS = (
    "the parameters used for the first output, defaults included, without prompts and "
    "seed; `engine` holds the server's settings"
)
Name = Annotated[str | None, Field(max_length=256)]  # names a user of the client


class GenerationRequest(BaseModel):
    """The fields of every request for pictures or videos."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: Prompt = Field(description="what to make")
    model: str | None = Field(None, description="the served model's id; default: that model")
    size: str | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto")
    seed: Any = ours("integer", "0 to 2**63 - 1; default: random; the answer reports it")
    timeout_s: Any = ours("number", "fail if not done after this many seconds")
    priority: Any = ours("integer", "-10 to 10; higher goes first")
    num_inference_steps: Any = ours("integer", "denoising steps")
    step_cache: Any = ours(
        "number",
        "skip steps whose predicted change of the denoiser's output is below this share, 0 "
        "(none) to 1; same as the header `x-step-cache`; default: the server's",
    )
    scheduler: Any = ours(
        "string",
        "one of the `schedulers` in `GET /v1/models`, by diffusers' class or by "
        "AUTOMATIC1111's or ComfyUI's name (`dpmpp_2m_karras`, `Euler a`); default: the "
        "model's",
    )
    enhance_prompt: Any = ours(
        "boolean",
        "rewrite the prompt first with the pipeline's own language model or the server's "
        "(`--rewriter`, `--language-url`); the answer contains `revised_prompt`; default: "
        "the server's",
    )
    prompt_weights: Any = ours(
        "boolean",
        "apply AUTOMATIC1111's prompt weights, `(word:1.3)`, `(word)`, `[word]`; SD 1.5 and"
        " SDXL, needs compel; default: weights are drawn as words",
    )
    guidance_scale: Any = ours("number", "how closely to follow the prompt")
    negative_prompt: Any = ours("string", "what not to show")
    webhook: str | None = Field(
        None,
        max_length=2048,
        description="for jobs: URL that receives a signed event when the job has ended; needs "
        "--webhook-secret",
    )
    user: Name = Field(None, description="id of the client's own user; users divide a key's share")
    safety_identifier: Name = Field(None, description="same as `user`; repeated in the answer")


class ImageRequest(GenerationRequest):
    """`POST /v1/images/generations`.

    Any other parameter of the pipeline's `__call__` may be sent at top level too: `GET
    /v1/models` lists them.
    """

    model_config = _example("a red circle on a blue background", size="64x64")

    prompt: Prompts = Field(
        description="what to show; each prompt of a list has n images, in order"
    )
    negative_prompt: Any = ours("string", "what not to show; a list if prompt is a list")
    n: Any = ours("integer", "images of each prompt, with seeds s, s+1, ...", 1)
    deadline_s: Any = ours("number", "refuse the request if it cannot end within this many seconds")
    true_cfg_scale: Any = ours("number", "above 1: guidance with a negative prompt (FLUX.1)")
    lora: Any = ours(
        "array",
        'adapters by id or file name: [{"id": NAME, "scale": 1.0}, ...]; `target` chooses '
        "one of two experts",
    )
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="url: a link that works for an hour without an API key"
    )
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    output_compression: int | None = Field(None, ge=0, le=100, description="for JPEG and WebP")
    quality: Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"] | None = (
        Field(
            None,
            description="multiplies the model's default steps: low 0.5, medium and standard 1, "
            "high and hd 1.5, xhigh 2, max 3; no effect on models of up to 8 steps; "
            "num_inference_steps takes precedence",
        )
    )
    background: Literal["auto", "opaque"] | None = Field(
        None, description="no effect: pictures are opaque; transparent is refused"
    )
    moderation: Literal["auto", "low"] | None = Field(
        None, description="accepted for OpenAI's clients; nothing is moderated"
    )
    stream: bool | None = Field(None, description="answer with server-sent events")
    partial_images: int | None = Field(
        None,
        ge=0,
        le=3,
        description="maximum previews per image: in a stream, or for a job at /v1/events",
    )
    return_stage_metrics: bool | None = Field(None, description="include `metrics` in the answer")
    background_job: bool | None = Field(
        False, description="answer 202 at once, with a job to poll at /v1/jobs/{id}"
    )


class VideoRequest(GenerationRequest):
    """`POST /v1/videos`, as JSON or as a form.

    Any other parameter of the pipeline's `__call__` may be sent too: `GET /v1/models` lists them.
    In a form, numbers are written as text and lists as JSON.
    """

    model_config = _example("a red circle moving right on a blue background")

    seconds: Any = ours("string", "duration; alternative to num_frames")
    fps: Any = ours("number", "frames per second, 1 to 240; default: the model's, or 16")
    num_frames: Any = ours(
        "integer", "number of frames, adjusted to the model's k * n + 1; alternative to seconds"
    )
    guidance_scale_2: Any = ours("number", "guidance_scale of a second denoiser")


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


class RemixRequest(BaseModel):
    """`POST /v1/videos/{id}/remix`: the same video with another prompt, from the same seed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Prompt


_PIPELINE_FIELDS = """num_inference_steps guidance_scale guidance_scale_2 true_cfg_scale
negative_prompt num_frames lora deadline_s priority step_cache scheduler enhance_prompt
prompt_weights"""
PIPELINE_FIELDS = frozenset(_PIPELINE_FIELDS.split())
"""Fields that are passed to the pipeline, as are all fields that no body declares."""

_NULL_FIELDS = "style complexity frame_count frame_duration_ms svg markup input_fidelity"
NULL_FIELDS = tuple(_NULL_FIELDS.split())
"""OpenAI's fields that have no meaning here: a client may send them as null."""


class Image(BaseModel):
    b64_json: str | None = Field(
        default=None, description="the file, unless response_format is url"
    )
    url: str | None = Field(default=None, description="a link that works for an hour without a key")
    revised_prompt: str | None = Field(
        default=None, description="the rewritten prompt, with `enhance_prompt`"
    )
    seed: int = Field(description="reproduces this image")
    skipped_steps: int | None = Field(
        default=None, description="denoising steps without a forward, with `step_cache`"
    )


class TokenDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class UsageBody(BaseModel):
    """Tokens of the text and patches of the latent picture."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int


class StageMetrics(BaseModel):
    """Metrics of one answer in vLLM-Omni's format."""

    stage_durations: dict[str, float] = Field(
        description="seconds of each phase; stage_0_gen_ms: milliseconds without the queue"
    )
    peak_memory_mb: float | None = Field(
        None, description="peak memory of the device; null if unknown"
    )


class ImagesResponse(BaseModel):
    created: int = Field(description="Unix time, seconds")
    data: list[Image]
    model: str
    size: str
    output_format: str
    background: str = "opaque"
    quality: str = "auto"
    safety_identifier: str | None = None
    timings: Timings = Field(description="times of the slowest image, seconds")
    usage: UsageBody
    warnings: list[str] | None = Field(None, description="for example: the prompt was truncated")
    settings: dict[str, Any] | None = Field(None, description=SETTINGS)
    metrics: StageMetrics | None = Field(default=None, description="if return_stage_metrics is set")


class ErrorBody(BaseModel):
    message: str = Field(description="the problem, the rule, and a value that works")
    type: str = Field(description="OpenAI's class of errors, such as invalid_request_error")
    param: str | None = Field(description="the field at fault")
    code: str = Field(description="one of the codes in the table of errors")


class Error(BaseModel):
    """Every error response has this shape and the header `x-request-id`."""

    error: ErrorBody
