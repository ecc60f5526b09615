"""A conversation as a request for `n` texts, with seeds s, s+1, ..."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from carpool.errors import InvalidValue, UnsupportedParameter
from carpool.media.reader import ImageData
from carpool.request.expand import fanned_out
from carpool.request.own_values import check_n, seeds
from carpool.request.parameters import check
from carpool.request.rules import MOST_TOKENS
from carpool.request.values import is_int
from carpool.server.bodies import schema
from carpool.server.bodies.forms import MOST_IMAGES, url_of, validated
from carpool.server.bodies.named_pictures import decoded
from carpool.server.compat.chat.bodies import ChatRequest, MessagePart, check_fields, parts_of
from carpool.server.compat.chat.text_answers import LIMITS, ParsedTextRequest
from carpool.server.openai_fields import engine_request, pipeline_parameters
from carpool.server.state import AuthenticatedRequest, ServedModel

NEUTRAL = ("prompt_cache_key", "parallel_tool_calls")  # they do not change the text
_IDLE: dict[str, Sequence[Any]] = {  # fields without effect: values that need no warning
    "store": (False,), "metadata": ({},), "service_tier": ("auto", "default"),
}  # fmt: skip
_OFF: dict[str, Sequence[Any]] = {  # neutral values of fields
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "audio": (),
    "prediction": (),
    "step_cache": (0,),
    "background_job": (False,),
    "partial_images": (0,),
    "size": ("auto",),
    "webhook": (),
}
_INSTEAD = {"background_job": "texts have no jobs: stream=true sends them as they are written"}
_READ = "role content name annotations reasoning reasoning_content reasoning_details"
_FIELDS = frozenset(_READ.split())
"""Fields of messages that are read, or say nothing to the model; others are refused."""


class TextRequest(schema.GenerationRequest):
    """The fields of a conversation that are not parameters of `generate`."""

    prompt: Any = None
    n: Any = None
    deadline_s: Any = None


async def parse_text_request(
    context: AuthenticatedRequest,
    model: ServedModel,
    name: str,
    chat: ChatRequest,
    *,
    has_usage: bool,
) -> ParsedTextRequest:
    """Read the pictures of a conversation, and check it.

    Args:
        model: has the card of just the language model.
        name: its name in the answer.
        has_usage: a stream ends with its usage.

    Raises:
        CarpoolError: the conversation is invalid.
    """
    values = _values(chat.model_extra or {})
    idle = [name for name in _IDLE if values.pop(name, None) not in (None, *_IDLE[name])]
    modalities = [entry for entry in chat.modalities or [] if entry != "text"]
    if modalities:
        rule = 'only texts are written here: leave it out, or send ["text"]'
        raise UnsupportedParameter.of("modalities", chat.modalities, rule)
    for field in ("image_config", "return_stage_metrics"):
        if getattr(chat, field):
            raise UnsupportedParameter(f"{field} is only for pictures: leave it out", param=field)
    body = validated(TextRequest, values)
    fields = body.model_dump(exclude_unset=True)
    parameters = pipeline_parameters(model, body, fields, "text", context.client)
    if "prompt" in values or "image" in parameters:
        raise UnsupportedParameter("prompt is not supported here: send messages", param="prompt")
    messages, pictures = _conversation(chat.messages)
    n, images = check_n(1 if body.n is None else body.n, model.max_n), list[Any]()
    if pictures and model.card.tasks[0].takes("image"):
        reading = decoded({"image_url": pictures}, model.card, context.intake(n), url_of)
        images = (await context.unless_disconnected(reading))["image_url"]
    if body.deadline_s is not None:
        parameters["deadline_s"] = body.deadline_s
    parameters |= {"messages": messages, **({"image": images} if images else {})}
    whole = engine_request(body, context.client.key, parameters, None)
    warnings = tuple(f"{name} has no effect on texts" for name in idle)
    requests = [
        replace(check(model.card, request, from_json=True), model=model.id, warnings=warnings)
        for request in fanned_out(whole, whole.parameters, seeds(body.seed, n), n)
    ]
    return ParsedTextRequest(
        request_id=context.request.scope["request_id"], model=name, has_usage=has_usage,
        is_streamed=bool(chat.stream), requests=requests, inputs=images,
        fields={**fields, "messages": messages},
    )  # fmt: skip


def _values(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields of a body to the parameters of language models.

    Raises:
        Rejected: a field is not supported.
    """
    values = {
        name: value for name, value in extra.items() if name not in NEUTRAL and value is not None
    }
    for name in _OFF.keys() & values.keys():
        if (value := values.pop(name)) not in _OFF[name]:
            rule = _INSTEAD.get(name, "is not supported: leave it out")
            raise UnsupportedParameter.of(name, value, rule)
    for name in LIMITS:
        if (limit := values.pop(name, None)) is not None:
            if not is_int(limit) or not 1 <= limit <= MOST_TOKENS:
                rule = f"must be a whole number from 1 to {MOST_TOKENS}"
                raise InvalidValue.of(name, limit, rule)
            if values.setdefault("max_new_tokens", limit) != limit:
                rule = f"another limit of tokens is {values['max_new_tokens']}: send one of them"
                raise InvalidValue.of(name, limit, rule)
    if not isinstance(stop := values.get("stop", []), list):
        values["stop"] = [stop]
    return values


def _conversation(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[ImageData]]:
    """Messages with placeholders for their pictures, and the pictures in order."""
    plain, pictures = [], list[ImageData]()
    for message in messages:
        if message.get("role") == "user":
            check_fields(message)
        for name in sorted(message.keys() - _FIELDS):
            if message[name]:
                rule = "is not supported: leave such messages out"
                text = f"{name[:60]} of a message {rule}"
                raise UnsupportedParameter(text, param="messages")
        parts = list(parts_of(message))
        content = list(_places(parts, pictures))
        texts = [part["text"] for part in content if part["type"] == "text"]
        role = "system" if message.get("role") == "developer" else message.get("role")
        is_text = len(texts) == len(content)
        plain.append({"role": role, "content": "\n".join(texts) if is_text else content})
    if len(pictures) > MOST_IMAGES:
        rule = f"must have at most {MOST_IMAGES}"
        raise InvalidValue(f"messages have {len(pictures)} pictures: {rule}", param="messages")
    return plain, pictures


def _places(parts: Sequence[MessagePart], pictures: list[ImageData]) -> Iterator[dict[str, Any]]:
    for kind, value in parts:
        if kind == "image":
            pictures.append(value)
            yield {"type": "image"}
        else:
            yield {"type": "text", "text": value}
