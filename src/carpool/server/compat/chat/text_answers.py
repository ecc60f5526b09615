"""Texts as answers of a chat, in OpenAI's format: one JSON object, or a stream of chunks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar

from carpool.errors import PipelineFailed, Rejected
from carpool.server.bodies import schema
from carpool.server.compat.chat import bodies
from carpool.server.compat.chat.answers import Chunks
from carpool.telemetry import tracing
from carpool.types import CheckedRequest
from carpool.worker import protocol

LIMITS = ("max_completion_tokens", "max_tokens")
"""OpenAI's names of the token limit, the current one first."""


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
