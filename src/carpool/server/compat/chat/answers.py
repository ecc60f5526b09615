"""Pictures as answers of a chat: one JSON object, or a stream of chunks.

With `modalities` pictures are in `images`, as in OpenRouter; otherwise they are parts of `content`,
as in vLLM-Omni.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.sse import format_sse_event

from carpool.server.bodies import schema
from carpool.server.compat.chat import bodies
from carpool.server.image_request import ParsedImageRequest, encoded
from carpool.server.responses.stage_metrics import stage_durations
from carpool.types import Timings
from carpool.worker import protocol


def usage_of(usage: schema.UsageBody) -> bodies.ChatUsage:
    """Usage with the field names of chat completions."""
    details = usage.input_tokens_details
    return bodies.ChatUsage(
        prompt_tokens=usage.input_tokens,
        prompt_tokens_details=bodies.ChatTokens(
            text_tokens=details.text_tokens, image_tokens=details.image_tokens
        ),
        completion_tokens=usage.output_tokens,
        completion_tokens_details=bodies.ChatTokens(image_tokens=usage.output_tokens),
        total_tokens=usage.total_tokens,
    )


@dataclass(slots=True, kw_only=True)
class Chunks:
    """Writes the events of a stream."""

    request_id: str
    model: str
    has_usage: bool  # a last chunk has the usage
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(
        self,
        delta: dict[str, Any],
        number: int = 0,
        *,
        finish_reason: str | None = None,
        **extra: Any,
    ) -> bytes:
        choice = {"index": number, "delta": delta, "finish_reason": finish_reason}
        return self.event(choices=[choice], **extra)

    def event(self, **fields: Any) -> bytes:
        chunk = {
            "id": f"chatcmpl-{self.request_id}", "object": "chat.completion.chunk",
            "created": self.created, "model": self.model,
        }  # fmt: skip
        return format_sse_event(data_str=json.dumps(chunk | fields))


@dataclass(slots=True, kw_only=True)
class ImageChunks(Chunks):
    """A chunk for each picture, the finish reason, the usage."""

    image_request: ParsedImageRequest
    has_parts: bool
    has_metrics: bool
    _usages: list[protocol.TokenUsage] = field(default_factory=list)
    _timings: list[Timings] = field(default_factory=list)
    _warnings: dict[str, None] = field(default_factory=dict)  # in order of arrival

    def __call__(self, number: int, update: protocol.Done) -> bytes:
        """The events of a picture. Encodes it: call it on a thread."""
        image_request = self.image_request
        self._usages.append(update.usage)
        self._timings.append(update.timings)
        self._warnings |= dict.fromkeys(update.warnings)
        file = image_request.file(number, update.pictures[0], update.settings)
        revised = update.settings.get("revised_prompt")
        part = _part(encoded(file), image_request.format, update, revised)
        # vLLM-Omni's clients read `modality`
        events = [self.chunk(_placed([part], self.has_parts), modality="image")]
        if len(self._usages) == len(image_request.requests):
            timings = max(self._timings, key=lambda timings: timings.total_s)
            metrics = {"metrics": {"stage_durations": stage_durations(timings)}}
            extra: dict[str, Any] = metrics if self.has_metrics else {}
            extra = extra | ({"warnings": [*self._warnings]} if self._warnings else {})
            events.append(self.chunk({}, finish_reason="stop", **extra))
            if self.has_usage:
                usage = usage_of(image_request.usage(self._usages)).model_dump()
                events.append(self.event(choices=[], usage=usage))
        return b"".join(events)

    def completion(
        self, images: schema.ImagesResponse, metrics: schema.StageMetrics | None
    ) -> bodies.ChatCompletion:
        """The answer with all pictures, as one JSON object."""
        parts = [
            _part(image.b64_json or "", images.output_format, image, image.revised_prompt)
            for image in images.data
        ]
        message = bodies.ChatMessage.model_validate(_placed(parts, self.has_parts))
        return bodies.ChatCompletion(
            id=f"chatcmpl-{self.request_id}", created=images.created, model=images.model,
            choices=[bodies.ChatChoice(message=message)], usage=usage_of(images.usage),
            metrics=metrics, warnings=images.warnings, settings=images.settings,
        )  # fmt: skip


def _part(
    b64: str, format_: str, image: protocol.Done | schema.Image, revised: str | None
) -> bodies.ImagePart:
    return bodies.ImagePart(
        image_url=bodies.ImageURL(url=f"data:image/{format_};base64,{b64}"),
        seed=image.seed, skipped_steps=image.skipped_steps or None, revised_prompt=revised,
    )  # fmt: skip


def _placed(parts: Sequence[bodies.ImagePart], has_parts: bool) -> dict[str, Any]:
    """Put pictures into the field that the client reads."""
    plain = [part.model_dump(exclude_none=True) for part in parts]
    if has_parts:
        return {"role": "assistant", "content": plain}
    return {"role": "assistant", "content": "", "images": plain}
