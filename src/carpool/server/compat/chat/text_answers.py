"""Texts as answers of a chat, in OpenAI's format: one JSON object, or a stream of chunks."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse

from carpool.errors import PipelineFailed, Rejected
from carpool.server.bodies import schema
from carpool.server.compat.chat import bodies
from carpool.server.compat.chat.answers import Chunks
from carpool.server.compat.chat.texts import LIMITS, ParsedTextRequest
from carpool.server.responses.generation import gather
from carpool.server.responses.respond import answer_by_key
from carpool.server.responses.stream import EventStream, events
from carpool.server.state import AuthenticatedRequest
from carpool.telemetry import tracing
from carpool.types import CheckedRequest
from carpool.worker import encoding, protocol


@dataclass(slots=True, kw_only=True)
class TextChunks(Chunks):
    """The chunks of texts; a `stream.StreamedRequest`."""

    requests: Sequence[CheckedRequest]
    texts: list[protocol.RawText] = field(default_factory=list)  # finished texts
    _sent: Counter[int] = field(default_factory=Counter)  # characters of each choice

    def usage(self, usages: Sequence[protocol.TokenUsage]) -> schema.UsageBody:
        """Empty: tokens are counted when texts end."""
        details = schema.TokenDetails(text_tokens=0, image_tokens=0)
        return schema.UsageBody(
            input_tokens=0, input_tokens_details=details, output_tokens=0,
            output_tokens_details=details, total_tokens=0,
        )  # fmt: skip

    def write_event(
        self, _: Any, number: int, update: protocol.Preview | protocol.Done, index: int
    ) -> bytes:
        """The events of a piece of a text, or of its end."""
        role = {"role": "assistant", "content": ""}
        chunks = [self.chunk(role, number)] if index == 0 else []
        if isinstance(update, protocol.Preview):
            self._sent[number] += len(update.text)
            return b"".join([*chunks, self.chunk({"content": update.text}, number)])
        text = text_of(update)
        self.texts.append(text)
        if rest := text.text[self._sent[number] :]:  # was held back: it could begin a stop text
            chunks.append(self.chunk({"content": rest}, number))
        extra = {"warnings": update.warnings} if update.warnings else {}
        chunks.append(self.chunk({}, number, finish_reason=text.finish_reason, **extra))
        if self.has_usage and len(self.texts) == len(self.requests):
            usage = usage_of(self.texts).model_dump(exclude_none=True)
            chunks.append(self.event(choices=[], usage=usage))
        return b"".join(chunks)


async def respond_with_texts(
    context: AuthenticatedRequest, work: ParsedTextRequest, limit_name: str, has_usage: bool | None
) -> JSONResponse | EventStream:
    """Run requests for texts while the client is connected.

    Args:
        limit_name: the name of the token limit in the body.
        has_usage: end the stream with a usage chunk; None: answer without a stream.
    """
    state, request, owner = context.state, context.request, context.client.owner
    live: asyncio.Queue[bytes | None] = asyncio.Queue()
    chunks = TextChunks(
        request_id=request.scope["request_id"], model=work.model, has_usage=bool(has_usage),
        requests=work.requests,
    )  # fmt: skip

    async def answer_once() -> list[bytes]:
        await context.check_room()
        for image in work.images:
            await context.intake().run(partial(encoding.pack, image))
        state.observer.began(request, owner, work.requests)
        answers: list[bytes] = []
        try:
            if has_usage is None:
                outputs = await gather(
                    lambda number: state.backend.submit(work.requests[number]), len(work.requests)
                )
                chunks.texts = [text_of(output) for output in outputs]
                answers = [_completion(chunks, outputs)]
            else:
                stream = events(
                    state.backend, chunks, on_output=_ignore, previewed=_ignore, run=_inline
                )
                async with aclosing(stream):  # type: ignore[type-var]
                    async for event in stream:
                        live.put_nowait(event)
                        answers.append(event)
        except Rejected as error:
            raise _as_sent(error, limit_name) from error
        total = usage_of(chunks.texts)
        tracing.used(total.prompt_tokens, total.completion_tokens)
        return answers

    identity = partial(work.identity, stream=has_usage)
    answer = await answer_by_key(
        context, identity, answer_once, None if has_usage is None else live
    )
    if isinstance(answer, EventStream):
        return answer
    assert isinstance(answer, list)
    return JSONResponse(json.loads(answer[0]))


def _completion(chunks: TextChunks, outputs: Sequence[protocol.Done]) -> bytes:
    choices = [
        bodies.ChatChoice(
            index=number,
            message=bodies.ChatMessage(content=text.text),
            finish_reason="length" if text.finish_reason == "length" else "stop",
            seed=output.seed,
        )
        for number, (text, output) in enumerate(zip(chunks.texts, outputs, strict=True))
    ]
    warnings = list(dict.fromkeys(text for output in outputs for text in output.warnings))
    answer = bodies.ChatCompletion(
        id=f"chatcmpl-{chunks.request_id}", created=chunks.created, model=chunks.model,
        choices=choices, usage=usage_of(chunks.texts), warnings=warnings or None,
    )  # fmt: skip
    return answer.model_dump_json(exclude_none=True).encode()


def usage_of(texts: Sequence[protocol.RawText]) -> bodies.ChatUsage:
    """The tokens of several answers to one conversation; its own tokens count once."""
    prompt = texts[0].prompt_tokens if texts else 0
    completion = sum(text.completion_tokens for text in texts)
    return bodies.ChatUsage(
        prompt_tokens=prompt,
        prompt_tokens_details=bodies.ChatTokens(),
        completion_tokens=completion,
        completion_tokens_details=bodies.ChatTokens(),
        total_tokens=prompt + completion,
    )


def text_of(output: protocol.Done) -> protocol.RawText:
    """The text of an output."""
    if output.text is None:
        raise PipelineFailed("the pipeline gave no text")
    return output.text


def _as_sent(error: Rejected, limit_name: str) -> Rejected:
    """The same error, with the client's name of the token limit."""
    if error.param != "max_new_tokens":
        return error
    text = str(error).replace("max_new_tokens", limit_name)
    return type(error)(text, param=limit_name)


def limit_name(fields: dict[str, Any]) -> str:
    """The name of the token limit in a body."""
    return next((name for name in LIMITS if fields.get(name) is not None), "max_new_tokens")


def _ignore(*_: Any) -> None:
    pass


async def _inline(work: Callable[[], Any]) -> Any:
    return work()
