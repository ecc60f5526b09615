"""A conversation as a request for `n` texts, with seeds s, s+1, ...; its answer.

The answer has OpenAI's format: one JSON object, or a stream of chunks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar

from carpool.errors import InvalidValue, PipelineFailed, Rejected, UnsupportedParameter
from carpool.media.reader import ImageData
from carpool.request.expand import fanned_out
from carpool.request.own_values import check_n, seeds
from carpool.request.parameters import check
from carpool.request.rules import MOST_TOKENS
from carpool.request.values import is_int
from carpool.server.bodies import schema
from carpool.server.bodies.forms import MOST_IMAGES, url_of, validated
from carpool.server.bodies.json_pictures import decoded
from carpool.server.compat.chat import bodies
from carpool.server.compat.chat.answers import Chunks
from carpool.server.compat.chat.bodies import ChatRequest, check_fields, parts_of
from carpool.server.openai_fields import engine_request, pipeline_parameters
from carpool.server.state import AuthenticatedRequest, ServedModel
from carpool.telemetry import tracing
from carpool.types import CheckedRequest
from carpool.worker import protocol

LIMITS = ("max_completion_tokens", "max_tokens")
"""OpenAI's names of the token limit, the current one first."""
NEUTRAL = ("prompt_cache_key", "parallel_tool_calls")  # they do not change the text
_IDLE: dict[str, Sequence[Any]] = {  # fields without effect: values that need no warning
    "store": (False,), "metadata": ({},), "service_tier": ("auto", "default"),
}  # fmt: skip
_OFF: dict[str, Sequence[Any]] = {  # neutral values of fields
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("logprobs", "background_job"), (False,)),
    **dict.fromkeys(("top_logprobs", "frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("step_cache", "partial_images"), (0,)),
    **dict.fromkeys(("audio", "prediction", "webhook"), ()),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "size": ("auto",),
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


@dataclass(slots=True, kw_only=True)
class ParsedTextRequest(Chunks):
    """A checked request for texts, one engine request each; a `respond.ParsedRequest`."""

    requests: Sequence[CheckedRequest]
    inputs: list[Any]  # the pictures of its messages
    fields: dict[str, Any]  # the fields of its body
    is_streamed: bool
    is_chat: ClassVar[bool] = True
    _texts: list[protocol.RawText] = field(default_factory=list)  # finished texts
    _sent: Counter[int] = field(default_factory=Counter)  # characters of each choice

    def identity(self, **extra: Any) -> dict[str, Any]:
        """The content that two requests with one `Idempotency-Key` must share."""
        digests = [sha256(image.tobytes()).hexdigest() for image in self.inputs]
        return {**self.fields, "pictures": digests, **extra}

    def usage(self, usages: Sequence[protocol.TokenUsage]) -> schema.UsageBody:
        """The tokens of all finished texts."""
        usage, details = usage_of(self._texts), schema.TokenDetails(text_tokens=0, image_tokens=0)
        return schema.UsageBody(
            input_tokens=usage.prompt_tokens, input_tokens_details=details,
            output_tokens=usage.completion_tokens, output_tokens_details=details,
            total_tokens=usage.total_tokens,
        )  # fmt: skip

    async def answer(self, outputs: Sequence[protocol.Done], **_: Any) -> bodies.ChatCompletion:
        """The answer with all texts."""
        texts = [text_of(output) for output in outputs]
        choices = [
            bodies.ChatChoice(
                index=number,
                message=bodies.ChatMessage(content=text.text),
                finish_reason="length" if text.finish_reason == "length" else "stop",
                seed=output.seed,
            )
            for number, (text, output) in enumerate(zip(texts, outputs, strict=True))
        ]
        warnings = list(dict.fromkeys(text for output in outputs for text in output.warnings))
        usage = usage_of(texts)
        tracing.used(usage.prompt_tokens, usage.completion_tokens)
        return bodies.ChatCompletion(
            id=f"chatcmpl-{self.request_id}", created=self.created, model=self.model,
            choices=choices, usage=usage, warnings=warnings or None,
        )  # fmt: skip

    def write_event(
        self, number: int, update: protocol.Preview | protocol.Done, index: int
    ) -> bytes:
        """The events of a piece of a text, or of its end."""
        role = {"role": "assistant", "content": ""}
        chunks = [self.chunk(role, number)] if index == 0 else []
        if isinstance(update, protocol.Preview):
            self._sent[number] += len(update.text)
            return b"".join([*chunks, self.chunk({"content": update.text}, number)])
        text = text_of(update)
        self._texts.append(text)
        if rest := text.text[self._sent[number] :]:  # was held back: it could begin a stop text
            chunks.append(self.chunk({"content": rest}, number))
        extra = {"warnings": update.warnings} if update.warnings else {}
        chunks.append(self.chunk({}, number, finish_reason=text.finish_reason, **extra))
        if self.has_usage and len(self._texts) == len(self.requests):
            usage = usage_of(self._texts).model_dump(exclude_none=True)
            chunks.append(self.event(choices=[], usage=usage))
        return b"".join(chunks)


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
    for option in ("image_config", "return_stage_metrics"):
        if getattr(chat, option):
            raise UnsupportedParameter(f"{option} is only for pictures: leave it out", param=option)
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
                text = f"{name[:60]} of a message is not supported: leave such messages out"
                raise UnsupportedParameter(text, param="messages")
        parts = list(parts_of(message))
        images = [value for kind, value in parts if kind == "image"]
        pictures += images
        role = "system" if message.get("role") == "developer" else message.get("role")
        content: Any = "\n".join(value for kind, value in parts if kind == "text")
        if images:
            content = [
                {"type": "image"} if kind == "image" else {"type": "text", "text": value}
                for kind, value in parts
            ]
        plain.append({"role": role, "content": content})
    if len(pictures) > MOST_IMAGES:
        rule = f"must have at most {MOST_IMAGES}"
        raise InvalidValue(f"messages have {len(pictures)} pictures: {rule}", param="messages")
    return plain, pictures


def usage_of(texts: Sequence[protocol.RawText]) -> bodies.ChatUsage:
    """The tokens of several answers to one conversation; its own tokens count once."""
    prompt, images = (texts[0].prompt_tokens, texts[0].image_tokens) if texts else (0, 0)
    completion = sum(text.completion_tokens for text in texts)
    return bodies.ChatUsage(
        prompt_tokens=prompt,
        prompt_tokens_details=bodies.ChatTokens(text_tokens=prompt - images, image_tokens=images),
        completion_tokens=completion,
        completion_tokens_details=bodies.ChatTokens(text_tokens=completion),
        total_tokens=prompt + completion,
    )


def text_of(output: protocol.Done) -> protocol.RawText:
    """The text of an output."""
    if output.text is None:
        raise PipelineFailed("the pipeline gave no text")
    return output.text


def as_sent(error: Rejected, fields: Mapping[str, Any]) -> Rejected:
    """The same error, with the client's name of the token limit."""
    if error.param != "max_new_tokens":
        return error
    name = next((name for name in LIMITS if fields.get(name) is not None), error.param)
    return type(error)(str(error).replace(error.param, name), param=name)
