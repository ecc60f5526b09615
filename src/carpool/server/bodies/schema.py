"""Bodies of requests and answers as pydantic models, which also make the OpenAPI document.

Field names are OpenAI's where OpenAI has one, diffusers' otherwise. Values of the pipeline's own
parameters are checked in `carpool.request.parameters`, as in Python; their types here are for the
document only.
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
from carpool.request.rules import MOST_TEXT
from carpool.types import Timings


def ours(type_: str, description: str, default: Any = None) -> Any:
    """Any value, documented as one of a type; `parameters.check` decides."""
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
Prompts = Annotated[  # a text, or a list of such
    str,
    Field(max_length=MOST_TEXT),
    WrapValidator(_one_or_several),
    PlainSerializer(lambda prompts: prompts),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
SETTINGS = (
    "that decided the first output, as they were used: the model's parameters with their defaults, "
    "and what no request chooses in `engine`; without prompts and seed"
)
Name = Annotated[str | None, Field(max_length=256)]  # names one of the client's own users


class GenerationRequest(BaseModel):
    """The fields of every body that asks for pictures or videos."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: Prompt = Field(description="what to show")
    model: str | None = Field(None, description="the served model's id; default: that model")
    size: str | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto")
    seed: Any = ours("integer", "0 to 2**63 - 1; drawn and reported when absent")
    timeout_s: Any = ours("number", "give up when it is not done in so many seconds")
    priority: Any = ours("integer", "-10 to 10; higher goes first")
    num_inference_steps: Any = ours("integer", "denoising steps")
    step_cache: Any = ours(
        "number",
        "skip steps while the denoiser's answer is predicted to change by less than this share, "
        "0 (none) to 1; the header `x-step-cache` says the same; default: the server's own",
    )
    scheduler: Any = ours(
        "string",
        "a sampler, by diffusers' class or as AUTOMATIC1111 and ComfyUI call it "
        "(`dpmpp_2m_karras`, `Euler a`), of those that `GET /v1/models` lists as `schedulers`; "
        "default: the model's own",
    )
    enhance_prompt: Any = ours(
        "boolean",
        "have a language model write the prompt anew first: the pipeline's own, or the server's "
        "`--rewriter` or `--language-url`; the answer has it as `revised_prompt`; default: the "
        "server's own",
    )
    prompt_weights: Any = ours(
        "boolean",
        "read weights in prompts as AUTOMATIC1111 writes them, `(word:1.3)`, `(word)`, `[word]`; "
        "for SD 1.5 and SDXL, where compel is installed; default: they are drawn as words",
    )
    guidance_scale: Any = ours("number", "how closely to follow the prompt")
    negative_prompt: Any = ours("string", "what not to show")
    webhook: str | None = Field(
        None,
        max_length=2048,
        description="of a job: a URL that is sent a signed event once it has ended, by servers "
        "with --webhook-secret",
    )
    user: Name = Field(None, description="of the client's own: users divide a key's share")
    safety_identifier: Name = Field(None, description="as `user`; given back in the answer")


class ImageRequest(GenerationRequest):
    """`POST /v1/images/generations`.

    Any other parameter of the pipeline's `__call__` may be sent at top level too: `GET
    /v1/models` lists them.
    """

    model_config = _example("a red circle on a blue background", size="64x64")

    prompt: Prompts = Field(
        description="what to show; each prompt of a list has n images, in order"
    )
    negative_prompt: Any = ours("string", "what not to show; a list where prompt is one")
    n: Any = ours("integer", "images of each prompt, with seeds s, s+1, ...", 1)
    deadline_s: Any = ours("number", "wished for in so many seconds; refused if it cannot be")
    true_cfg_scale: Any = ours("number", "classifier-free guidance of distilled models")
    lora: Any = ours(
        "array",
        'adapters by id or by their file: [{"id": NAME, "scale": 1.0}, ...]; with two experts also '
        "`target`",
    )
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="url: a link that needs no API key, for an hour"
    )
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    output_compression: int | None = Field(None, ge=0, le=100, description="of JPEG and WebP")
    quality: Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"] | None = (
        Field(
            None,
            description="steps, times the model's own: low 0.5, medium and standard 1, high and "
            "hd 1.5, xhigh 2, max 3; no change for models of up to 8 steps; "
            "num_inference_steps wins",
        )
    )
    background: Literal["auto", "opaque"] | None = Field(
        None, description="pictures are opaque: both say the same; transparent is refused"
    )
    moderation: Literal["auto", "low"] | None = Field(
        None, description="taken as OpenAI's clients send it; nothing is moderated here"
    )
    stream: bool | None = Field(None, description="answer with server-sent events")
    partial_images: int | None = Field(
        None,
        ge=0,
        le=3,
        description="previews of each image, at most: in a stream, or of a job at /v1/events",
    )
    return_stage_metrics: bool | None = Field(None, description="answer with `metrics`")
    background_job: bool | None = Field(
        False, description="answer 202 at once, with a job to be polled at /v1/jobs/{id}"
    )


class VideoRequest(GenerationRequest):
    """`POST /v1/videos`, as JSON or as a form.

    Any other parameter of the pipeline's `__call__` may be sent too: `GET /v1/models` lists them.
    In a form, numbers are written as text and lists as JSON.
    """

    model_config = _example("a red circle moving right on a blue background")

    seconds: Any = ours("string", "how long it is to be; instead of num_frames")
    fps: Any = ours("number", "frames a second, 1 to 240; default: the model's own, or 16")
    num_frames: Any = ours(
        "integer", "frames in all, made k * n + 1 as the model counts; instead of seconds"
    )
    guidance_scale_2: Any = ours("number", "the same of a second denoiser")


class RemixRequest(BaseModel):
    """`POST /v1/videos/{id}/remix`: the same video with another prompt, from the same seed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Prompt


_PIPELINE_FIELDS = """num_inference_steps guidance_scale guidance_scale_2 true_cfg_scale
negative_prompt num_frames lora deadline_s priority step_cache scheduler enhance_prompt
prompt_weights"""
PIPELINE_FIELDS = frozenset(_PIPELINE_FIELDS.split())
"""Fields of the bodies here that are handed on to the pipeline, as all unknown ones are."""

_NULL_FIELDS = "style complexity frame_count frame_duration_ms svg markup input_fidelity"
NULL_FIELDS = tuple(_NULL_FIELDS.split())
"""Further fields of OpenAI's without a meaning here: a client may send them as null."""


class Image(BaseModel):
    b64_json: str | None = Field(default=None, description="the file, where no url was asked for")
    url: str | None = Field(default=None, description="a link that needs no key, for an hour")
    revised_prompt: str | None = Field(
        default=None, description="the prompt as a language model wrote it anew: `enhance_prompt`"
    )
    seed: int = Field(description="that gives this image again")
    skipped_steps: int | None = Field(
        default=None, description="denoising steps without a forward; where `step_cache` was said"
    )


class TokenDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class UsageBody(BaseModel):
    """In tokens of the model: of its tokenizer, and patches of the latent picture."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int


class StageMetrics(BaseModel):
    """Metrics of one answer, as vLLM-Omni's load clients read them."""

    stage_durations: dict[str, float] = Field(
        description="seconds of each phase; stage_0_gen_ms: milliseconds without the queue"
    )
    peak_memory_mb: float | None = Field(
        None, description="of the device, the most so far; null where it is not known"
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
    timings: Timings = Field(description="of the image that took longest; seconds")
    usage: UsageBody
    warnings: list[str] | None = Field(None, description="such as that the prompt was truncated")
    settings: dict[str, Any] | None = Field(None, description=SETTINGS)
    metrics: StageMetrics | None = Field(
        default=None, description="where return_stage_metrics asks for it"
    )


class ErrorBody(BaseModel):
    message: str = Field(description="what was seen, the rule, what works instead")
    type: str = Field(description="OpenAI's class of errors, such as invalid_request_error")
    param: str | None = Field(description="the field at fault")
    code: str = Field(description="one of the codes in the table of errors")


class Error(BaseModel):
    """Every error has this shape, and the header `x-request-id`."""

    error: ErrorBody
