"""One request for pictures, from its body to its files: parsed, checked, answered.

Routes and dialects parse it (`requests.parse_image_request`); `responses/` runs and answers it.
"""

import base64
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from fastapi.sse import format_sse_event

from carpool import media
from carpool.errors import InvalidValue, UnsupportedParameter
from carpool.media.metadata import without_prompts
from carpool.request.expand import fanned_out, grouped, prompts_in
from carpool.request.images import NAMES as PICTURES
from carpool.request.images import size_of
from carpool.request.own_values import check_n, seeds
from carpool.request.parameters import check
from carpool.request.sizes import area_of
from carpool.server import openai_fields
from carpool.server.access.keys import KEYLESS, APIClient
from carpool.server.bodies import schema
from carpool.server.bodies.json_pictures import pictures_in
from carpool.server.state import ServedModel
from carpool.types import CheckedRequest
from carpool.worker import protocol

WITHOUT_EFFECT = {  # rules of fields that some kinds of answers leave without effect
    "output_compression": "is only for jpeg and webp: leave it out",
    "webhook": "is only for jobs: send background_job too, or leave it out",
    "response_format": "cannot be url in a stream, whose events have the pictures: leave it out",
    "partial_images": "needs a stream or a job: send stream or background_job too, or leave it out",
    "return_stage_metrics": "is not available in streams and jobs: leave it out",
}
Settings = Mapping[str, Any]
WorkKind = Literal["image_generation", "image_edit"]
StoreFile = Callable[[bytes, str], str]
"""Stores a file of a format; returns its URL. Runs on a thread."""

RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]


def encoded(file: bytes) -> str:
    """Encode a file as base64."""
    return base64.b64encode(file).decode()


@dataclass
class ParsedImageRequest:
    """A request for pictures: its body, its model, its input pictures.

    Reading `requests` checks the parameters: it has one engine request for each picture.
    """

    model: ServedModel
    body: schema.ImageRequest
    client: APIClient = KEYLESS
    kind: WorkKind = "image_generation"
    pictures: dict[str, Any] = field(default_factory=dict)  # pipeline arguments, with implied sizes
    digests: list[str] = field(default_factory=list)  # digests of the pictures as they were sent
    warnings: list[str] = field(default_factory=list)  # about fields that change nothing
    chunks: Callable[[int, protocol.Done], bytes] | None = None  # writes the events of a chat

    @cached_property
    def sent(self) -> dict[str, Any]:
        """The fields that the client sent."""
        return self.body.model_dump(exclude_unset=True)

    @cached_property
    def n(self) -> int:
        """The number of pictures of each prompt; InvalidValue if invalid."""
        return check_n(1 if self.body.n is None else self.body.n, self.model.max_n)

    @cached_property
    def outputs(self) -> int:
        """The total number of pictures: n for each prompt.

        Raises:
            InvalidValue: n is invalid, lists of prompts differ in length, or the total is too high.
        """
        n, max_n, prompts = self.n, self.model.max_n, prompts_in(self.sent)
        if prompts * n > max_n:
            name = "n" if prompts <= max_n else "prompt"
            limit = f"{max_n // prompts} of each" if name == "n" else f"{max_n} prompts"
            rule = f"must be at most {max_n} in one request, which is {limit}"
            problem = f"{prompts} prompts x n={n} are {prompts * n} pictures: {rule}"
            raise InvalidValue(problem, param=name)
        return prompts * n

    def identity(self, **fields: Any) -> dict[str, Any]:
        """The content that two requests with one `Idempotency-Key` must share."""
        return self.sent | fields | ({"pictures": self.digests} if self.digests else {})

    @cached_property
    def requests(self) -> list[CheckedRequest]:
        """Check all parameters, and make one request for each picture.

        Raises:
            Rejected, ModelNotFound: the message has the problem and the nearest valid value.
        """
        model, body, card = self.model, self.body, self.model.card
        parameters = openai_fields.pipeline_parameters(
            model, body, self.sent, "pictures", self.client
        )
        for name in schema.NULL_FIELDS:
            if parameters.pop(name, None) is not None:
                raise UnsupportedParameter(f"{name} is not supported: leave it out", param=name)
        self._refuse_without_effect()
        if not self.pictures:
            openai_fields.refuse_edits(card, parameters)
        parameters |= openai_fields.size_fields(card, body.size, parameters) | self.pictures
        parameters |= area_of(card, parameters)
        n, whole = self.n, openai_fields.engine_request(body, self.client.key, parameters, None)
        first_to_last = seeds(body.seed, self.outputs)
        parameters |= openai_fields.quality_steps(card, body.quality, parameters, self.warnings)
        rest: dict[str, Any] = {"previews": body.partial_images or 0, "warnings": (*self.warnings,)}
        checked = [
            replace(check(card, request, from_json=True), model=model.id, **rest)
            for request in fanned_out(whole, parameters, first_to_last, n)
        ]
        return grouped(checked, n)

    def _refuse_without_effect(self) -> None:
        body, is_now = self.body, not (self.body.stream or self.body.background_job)
        idle = {
            "output_compression": body.output_compression is not None and self.format == "png",
            "webhook": body.webhook is not None and not body.background_job,
            "response_format": body.stream and body.response_format == "url",
            "partial_images": body.partial_images and is_now,
            "return_stage_metrics": body.return_stage_metrics and not is_now,
        }
        for name in filter(idle.get, idle):
            raise UnsupportedParameter(f"{name} {WITHOUT_EFFECT[name]}", param=name)

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.stream)

    @property
    def is_chat(self) -> bool:
        return self.chunks is not None

    @property
    def inputs(self) -> list[Any]:
        """The input pictures."""
        arguments = self.requests[0].arguments
        return list(pictures_in([arguments.get(name, []) for name in PICTURES]))

    @property
    def format(self) -> media.Format:
        return self.body.output_format or "png"

    @property
    def quality(self) -> str:
        return self.body.quality or "auto"

    @property
    def user(self) -> str | None:
        return self.body.safety_identifier or self.body.user

    def file(self, number: int, picture: protocol.Picture, settings: Settings | None) -> bytes:
        """Encode a picture as a file. Blocks: call it on a thread.

        Args:
            settings: the settings to store in the file; None: a preview.
        """
        compression = self.body.output_compression
        return media.encode_image(
            picture,
            self.format,
            100 if compression is None else compression,
            self.model.file_metadata(
                None if settings is None else self.requests[number],
                settings,
                width=picture.width,
                height=picture.height,
            ),
        )

    def write_event(
        self, number: int, update: protocol.Preview | protocol.Done, index: int
    ) -> bytes:
        """Encode a preview or picture as an OpenAI event. Blocks: call it on a thread.

        A rewritten prompt has an event name of our own.

        Args:
            number: number of the picture.
            index: number of its previews before.
        """
        event: dict[str, Any]
        if isinstance(update, protocol.Done):
            if self.chunks is not None:
                return self.chunks(number, update)
            picture, kind = update.pictures[0], f"{self.kind}.completed"
            used = without_prompts(update.settings)
            fields = {
                "skipped_steps": update.skipped_steps,
                "revised_prompt": update.settings.get("revised_prompt"),
                "warnings": update.warnings, "settings": used, "safety_identifier": self.user,
            }  # fmt: skip
            event = {
                "usage": self.usage([update.usage]).model_dump(),
                "timings": asdict(update.timings),
                **{n: value for n, value in fields.items() if value or isinstance(value, str)},
            }
        elif update.picture is not None:
            picture, kind = update.picture, f"{self.kind}.partial_image"
            event = {"partial_image_index": index, "step": update.step, "steps": update.steps}
        else:
            kind = f"{self.kind}.revised_prompt"
            event = {"type": kind, "revised_prompt": update.text, "image_index": number}
            return format_sse_event(data_str=json.dumps(event), event=kind)
        settings = update.settings if isinstance(update, protocol.Done) else None
        event |= {
            "type": kind,
            "b64_json": encoded(self.file(number, picture, settings)),
            "created_at": int(time.time()),
            "size": f"{picture.width}x{picture.height}",
            "quality": self.quality,
            "background": "opaque",
            "output_format": self.format,
            "seed": self.requests[number].seed,
            "image_index": number,  # 0 to n - 1
        }
        return format_sse_event(data_str=json.dumps(event), event=kind)

    def usage(self, usages: Sequence[protocol.TokenUsage]) -> schema.UsageBody:
        """The usage of one or more pictures. Prompts and input pictures count once."""
        multiple = self.model.card.size_multiple_px
        images = pictures_in(self.requests[0].arguments.get("image", []))
        sizes = [size_of(image) for image in images]
        image_tokens = sum((size[0] // multiple) * (size[1] // multiple) for size in sizes if size)
        group = max(1, self.requests[0].group_size) if len(usages) > 1 else 1
        text = sum(usage.text_tokens for usage in usages[::group])
        output_tokens = sum(usage.image_tokens for usage in usages)
        return schema.UsageBody(
            input_tokens=text + image_tokens,
            input_tokens_details=schema.TokenDetails(text_tokens=text, image_tokens=image_tokens),
            output_tokens=output_tokens,
            output_tokens_details=schema.TokenDetails(text_tokens=0, image_tokens=output_tokens),
            total_tokens=text + image_tokens + output_tokens,
        )

    async def answer(
        self, outputs: Sequence[protocol.Done], *, link: StoreFile, run: RunInThread
    ) -> schema.ImagesResponse:
        """The answer with all pictures.

        Args:
            link: for `response_format` "url".
            run: runs the encoding of each picture on a thread.
        """
        is_link = self.body.response_format == "url"

        def image(number: int, output: protocol.Done) -> schema.Image:
            file = self.file(number, output.pictures[0], output.settings)
            return schema.Image(
                b64_json=None if is_link else encoded(file),
                url=link(file, self.format) if is_link else None,
                seed=output.seed,
                skipped_steps=output.skipped_steps or None,
                revised_prompt=output.settings.get("revised_prompt"),
            )

        first = outputs[0].pictures[0]
        return schema.ImagesResponse(
            created=int(time.time()),
            data=[await run(partial(image, *entry)) for entry in enumerate(outputs)],
            model=self.model.id,
            size=f"{first.width}x{first.height}",
            quality=self.quality,
            output_format=self.format,
            safety_identifier=self.user,
            timings=max((output.timings for output in outputs), key=lambda times: times.total_s),
            usage=self.usage([output.usage for output in outputs]),
            warnings=list(dict.fromkeys(text for part in outputs for text in part.warnings))
            or None,
            settings=without_prompts(outputs[0].settings) or None,
        )
