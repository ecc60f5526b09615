"""Run the requests of one HTTP request for pictures, and answer with the pictures as JSON."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from carpool import media
from carpool.fleet.serving import Serving
from carpool.media.metadata import without_prompts
from carpool.request.images import NAMES as PICTURES
from carpool.request.images import size_of
from carpool.server.bodies import schema
from carpool.server.bodies.named_pictures import pictures_in
from carpool.server.openai_fields import WorkKind
from carpool.server.state import ServedModel
from carpool.types import CheckedRequest
from carpool.worker import protocol

T = TypeVar("T")
RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ImageGeneration:
    """A checked HTTP request: one engine request a picture, and the form of the answer."""

    model: ServedModel
    body: schema.ImageRequest
    requests: Sequence[CheckedRequest]
    kind: WorkKind = "image_generation"
    event: Callable[..., bytes] | None = None  # writes a stream's events, where not as OpenAI's

    @property
    def inputs(self) -> list[Any]:
        """The pictures that it starts from."""
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

    def file(self, number: int, picture: protocol.Picture, used: Mapping[str, Any] | None) -> bytes:
        """A picture as a file. Blocks: not on the event loop.

        Args:
            used: the settings that decided it; None: it is a preview.
        """
        compression = self.body.output_compression
        return media.encode_image(
            picture,
            self.format,
            100 if compression is None else compression,
            self.model.file_metadata(
                None if used is None else self.requests[number],
                used,
                width=picture.width,
                height=picture.height,
            ),
        )

    def usage(self, usages: Sequence[protocol.TokenUsage]) -> schema.UsageBody:
        """The usage of one of the pictures, or of all. Prompts and input pictures count once."""
        multiple = self.model.card.size_multiple_px
        given = self.requests[0].arguments.get("image", [])
        sizes = [size_of(one) for one in pictures_in(given)]
        sent = sum((size[0] // multiple) * (size[1] // multiple) for size in sizes if size)
        each = max(1, self.requests[0].group_size) if len(usages) > 1 else 1
        text = sum(usage.text_tokens for usage in usages[::each])
        made = sum(usage.image_tokens for usage in usages)
        return schema.UsageBody(
            input_tokens=text + sent,
            input_tokens_details=schema.TokenDetails(text_tokens=text, image_tokens=sent),
            output_tokens=made,
            output_tokens_details=schema.TokenDetails(text_tokens=0, image_tokens=made),
            total_tokens=text + sent + made,
        )

    def pack(self) -> None:
        """Make its pictures ready to be sent to the worker. Blocks: not on the event loop."""
        for picture in self.inputs:
            protocol.pack(picture)


def encoded(file: bytes) -> str:
    """A file as base64."""
    return base64.b64encode(file).decode()


async def gather(submit: Callable[[int], Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Run requests side by side. If one fails, the others are cancelled, and it is raised."""
    if count == 1:
        return [await submit(0)]
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                tasks.append(group.create_task(submit(number)))
                await asyncio.sleep(0)  # input pictures take milliseconds to send
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def generate(
    backend: Serving,
    generation: ImageGeneration,
    *,
    link: Callable[[bytes], str],
    run: RunInThread,
) -> schema.ImagesResponse:
    """Run all requests, and answer when all are done.

    Args:
        link: stores a file and returns its URL; for `response_format` "url". On a thread.
        run: runs the encoding, a picture at a time.
    """
    requests = generation.requests
    done = await gather(lambda number: backend.submit(requests[number]), len(requests))
    pictures = [one.pictures[0] for one in done]

    def answered(number: int) -> schema.Image:
        one = done[number]
        file = generation.file(number, pictures[number], one.settings)
        image = schema.Image(seed=one.seed, skipped_steps=one.skipped_steps or None)
        if generation.body.response_format == "url":
            return image.model_copy(update={"url": link(file)})
        return image.model_copy(update={"b64_json": encoded(file)})

    return schema.ImagesResponse(
        created=int(time.time()),
        data=[await run(partial(answered, number)) for number in range(len(done))],
        model=generation.model.id,
        size=f"{pictures[0].width}x{pictures[0].height}",
        quality=generation.quality,
        output_format=generation.format,
        safety_identifier=generation.user,
        timings=max((one.timings for one in done), key=lambda timings: timings.total_s),
        usage=generation.usage([one.usage for one in done]),
        warnings=list(dict.fromkeys(text for one in done for text in one.warnings)) or None,
        settings=without_prompts(done[0].settings) or None,
    )
