"""`POST /v1/chat/completions`: a conversation as a request for pictures.

The prompt is the last message, which must be the user's. A model that edits pictures starts from
the pictures of that message, or, without any, from the newest answer's, so a conversation can edit
a picture step by step.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from carpool.errors import InvalidValue, UnsupportedParameter, nearest, show
from carpool.media.reader import ImageData
from carpool.request.card import Card
from carpool.server.bodies import schema
from carpool.server.bodies.forms import MOST_IMAGES, Form
from carpool.server.bodies.json_pictures import as_url
from carpool.server.compat.peers import fields as peers

_NEUTRAL = """temperature top_p top_k top_a min_p max_tokens max_completion_tokens stop logit_bias
frequency_penalty presence_penalty repetition_penalty logprobs top_logprobs store metadata
service_tier reasoning reasoning_effort include_reasoning verbosity prompt_cache_key
parallel_tool_calls provider route transforms plugins usage ignore_eos"""
NEUTRAL = frozenset(_NEUTRAL.split())
"""Fields about text or routing: they change no picture."""

AREAS = {"1K": 1024 * 1024, "2K": 2048 * 2048, "4K": 4096 * 4096}  # pixels of an `image_size`
FIELDS = frozenset({"role", "content", "name"})  # fields of a user's message
STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
"""Options of OpenAI and vLLM: the last equals the first, the second has no effect."""
MessagePart = tuple[Literal["text", "image"], Any]
"""A text, or a picture as it was sent."""
_RATIO = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")


class ChatRequest(BaseModel):
    """`POST /v1/chat/completions`.

    A language model answers with text. It takes `max_tokens` or `max_completion_tokens`,
    `temperature`, `top_p`, `top_k`, `min_p`, `stop`, `seed` and `n`; the defaults are the model's
    own. Other models answer with pictures. They take all fields of `POST /v1/images/generations`
    except `prompt` and `partial_images`, at top level or in `extra_body`; fields about text, such
    as `temperature`, are accepted without effect.
    """

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={
        "examples": [{"messages": [{"role": "user", "content": "a red circle"}]}]
    })  # fmt: skip

    messages: list[dict[str, Any]] = Field(
        min_length=1,
        description="the last message, the user's, is the prompt: a text, or parts of type text "
        "and image_url (data:image/png;base64,...)",
    )
    model: str | None = Field(None, description="the served model's id; default: that model")
    modalities: list[str] | None = Field(
        None,
        description='with "image", pictures are in `message.images`, as from OpenRouter; without '
        "modalities, in `message.content`, as from vLLM-Omni",
    )
    stream: bool | None = Field(None, description="answer in chunks, one per picture or token")
    stream_options: dict[str, Any] | None = Field(
        None, description='{"include_usage": true} adds a last chunk with `usage`'
    )
    image_config: dict[str, Any] | None = Field(
        None, description='{"aspect_ratio": "16:9", "image_size": "1K"}; alternative to size'
    )
    return_stage_metrics: bool | None = Field(None, description="include `metrics` in the answer")


class ImageURL(BaseModel):
    url: str = Field(description="data:image/png;base64,...")


class ImagePart(BaseModel):
    """A picture in a message."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageURL
    seed: int = Field(description="reproduces this image")
    skipped_steps: int | None = Field(
        default=None, description="denoising steps without a forward, with `step_cache`"
    )
    revised_prompt: str | None = Field(None, description="the prompt after `enhance_prompt`")


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | list[ImagePart] = Field(description="empty if there are `images`")
    images: list[ImagePart] | None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: ChatMessage
    finish_reason: Literal["stop", "length"] = "stop"
    seed: int | None = Field(default=None, description="reproduces this text")


class ChatTokens(BaseModel):
    text_tokens: int = 0
    image_tokens: int = 0


class ChatUsage(BaseModel):
    """Tokens of the text and patches of the latent picture."""

    prompt_tokens: int
    prompt_tokens_details: ChatTokens
    completion_tokens: int
    completion_tokens_details: ChatTokens
    total_tokens: int


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix time, seconds")
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    metrics: schema.StageMetrics | None = None
    warnings: list[str] | None = Field(None, description="for example: the prompt was truncated")
    settings: dict[str, Any] | None = Field(default=None, description=schema.SETTINGS)


def includes_usage(body: ChatRequest) -> bool:
    """Return whether a stream ends with its usage.

    Raises:
        UnsupportedParameter, InvalidValue: an option is unknown, or there is no stream.
    """
    options = body.stream_options or {}
    for name, value in options.items():
        if name not in STREAM_OPTIONS:
            text = f"stream_options.{name[:60]} is not supported{nearest(name, STREAM_OPTIONS)}"
            raise UnsupportedParameter(text, param="stream_options")
        if not isinstance(value, bool):
            text = f"stream_options.{name}={show(value)}: must be true or false"
            raise InvalidValue(text, param="stream_options")
    if options and not body.stream:
        rule = "is for streams: send stream=true too, or leave it out"
        raise InvalidValue(f"stream_options {rule}", param="stream_options")
    return bool(options.get("include_usage") or options.get("continuous_usage_stats"))


def conversation(card: Card, body: ChatRequest) -> Form:
    """Read a conversation as the fields of an `ImageRequest`, and its pictures.

    Raises:
        InvalidValue: a message is invalid.
        UnsupportedParameter: it requests something other than pictures.
    """
    modalities = set(body.modalities or ["image"])
    if "image" not in modalities or modalities - {"image", "text"}:
        raise UnsupportedParameter.of(
            "modalities", body.modalities, 'only pictures are made here: send ["image", "text"]'
        )
    *history, last = body.messages
    if last.get("role") != "user":
        rule = "it must be the user's, whose text is the prompt"
        problem = f"the last message has role {show(last.get('role'))}: {rule}"
        raise InvalidValue(problem, param="messages")
    check_fields(last)
    prompt, images = _content(last)
    values = peers.translated(body.model_extra or {}, card)
    names = {parameter.name for task in card.tasks for parameter in task.parameters}
    values = {
        name: value
        for name, value in values.items()
        if value is not None and name not in NEUTRAL - names
    }
    for name in ("prompt", "partial_images", "background_job", "response_format"):
        value = values.pop(name, None)
        if value not in (None, False, 0) and value != {"type": "text"}:
            raise UnsupportedParameter(f"{name} is not supported here: leave it out", param=name)
    values |= {"prompt": prompt, "model": body.model, "stream": bool(body.stream)}
    values |= _size(card, body.image_config or {}, values)
    talk = Form(values, images, name="image_url")
    if not images and card.tasks[0].takes("image"):
        talk.images = _newest_answer(history)
    if any(m.get("role") in ("system", "developer") or _content(m)[0] for m in history):
        talk.warnings = ["only the last message is the prompt: earlier texts were not read"]
    return talk


def check_fields(message: Mapping[str, Any]) -> None:
    """Refuse a user's message without content, or with unknown fields."""
    for name in message.keys() - FIELDS:
        text = f"messages: {name[:60]!r} is no field of a user's message{nearest(name, FIELDS)}"
        raise UnsupportedParameter(text, param="messages")
    if "content" not in message:
        raise InvalidValue("messages: a user's message lacks content", param="messages")


def _content(message: Mapping[str, Any]) -> tuple[str, list[ImageData]]:
    """The text and the pictures of a message."""
    parts = list(parts_of(message))
    texts = [value for kind, value in parts if kind == "text"]
    images = [value for kind, value in parts if kind == "image"]
    if len(images) > MOST_IMAGES:
        raise InvalidValue(f"a message has more than {MOST_IMAGES} pictures", param="messages")
    return "\n".join(texts), images


def parts_of(message: Mapping[str, Any]) -> Iterator[MessagePart]:
    """The texts and pictures of a message, in their order.

    Raises:
        InvalidValue: the content is neither text nor pictures.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        yield "text", content or ""
        return
    if not isinstance(content, list):
        rule = "must be a text, or a list of parts"
        raise InvalidValue(f"content={show(content)}: {rule}", param="messages")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield "text", part["text"]
        elif kind == "image_url":
            yield "image", _picture(part)
        else:
            text = f"a part of type {show(kind)}" if kind else f"part {show(part)}"
            rule = 'must be {"type": "text", "text": ...} or {"type": "image_url", ...}'
            raise InvalidValue(f"{text} in messages: {rule}", param="messages")


def _picture(part: Mapping[str, Any]) -> ImageData:
    value = part.get("image_url")
    return as_url(value.get("url") if isinstance(value, dict) else value, "image_url")


def _newest_answer(messages: Sequence[Mapping[str, Any]]) -> list[ImageData]:
    """The pictures of the newest answer that has any."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            beside = message.get("images")
            pictures = [_picture(part) for part in beside or [] if isinstance(part, dict)]
            if pictures := pictures or _content(message)[1]:
                return pictures[:MOST_IMAGES]
    return []


def _size(card: Card, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The size of an `image_config`, rounded to the model's multiples."""
    unknown = config.keys() - {"aspect_ratio", "image_size"}
    if unknown:
        name = f"image_config.{sorted(unknown)[0]}"[:60]
        raise UnsupportedParameter(f"{name} is not supported: leave it out", param=name)
    if not any(value is not None for value in config.values()):
        return {}
    if any(values.get(name) is not None for name in ("size", "width", "height")):
        raise InvalidValue("give image_config or a size, not both", param="image_config")
    match = _RATIO.fullmatch(str(config.get("aspect_ratio") or "1:1"))
    area = AREAS.get(str(config["image_size"])) if config.get("image_size") else None
    if match is None or not int(match[1]) or not int(match[2]):
        text = f"image_config.aspect_ratio={show(config.get('aspect_ratio'))}"
        raise InvalidValue(f"{text}: must be WIDTH:HEIGHT, such as 16:9", param="image_config")
    if config.get("image_size") and area is None:
        text = f"image_config.image_size={show(config['image_size'])}"
        raise InvalidValue(f"{text}: must be {' or '.join(AREAS)}", param="image_config")
    usual = card.usual_size_px or (8 * card.size_multiple_px,) * 2
    ratio = int(match[1]) / int(match[2])
    width = math.sqrt((area or math.prod(usual)) * ratio)
    multiple = card.size_multiple_px
    sides = [max(multiple, round(side / multiple) * multiple) for side in (width, width / ratio)]
    return {"size": f"{sides[0]}x{sides[1]}"}
