"""Runs the requests of one HTTP request for pictures, and answers with JSON."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from carpool.fleet.serving import Serving
from carpool.media.metadata import without_prompts
from carpool.server.bodies import schema
from carpool.server.image_request import ParsedImageRequest

T = TypeVar("T")
RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]


def encoded(file: bytes) -> str:
    """Encode a file as base64."""
    return base64.b64encode(file).decode()


async def gather(submit: Callable[[int], Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Run requests concurrently. The first failure cancels the rest and is raised."""
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
    image_request: ParsedImageRequest,
    *,
    link: Callable[[bytes], str],
    run: RunInThread,
) -> schema.ImagesResponse:
    """Run all requests, and answer when all are done.

    Args:
        link: stores a file and returns its URL, for `response_format` "url". Runs on a thread.
        run: runs the encoding of each picture on a thread.
    """
    requests = image_request.requests
    outputs = await gather(lambda number: backend.submit(requests[number]), len(requests))
    pictures = [output.pictures[0] for output in outputs]

    def answered(number: int) -> schema.Image:
        output = outputs[number]
        file = image_request.file(number, pictures[number], output.settings)
        image = schema.Image(
            seed=output.seed,
            skipped_steps=output.skipped_steps or None,
            revised_prompt=output.settings.get("revised_prompt"),
        )
        if image_request.body.response_format == "url":
            return image.model_copy(update={"url": link(file)})
        return image.model_copy(update={"b64_json": encoded(file)})

    return schema.ImagesResponse(
        created=int(time.time()),
        data=[await run(partial(answered, number)) for number in range(len(outputs))],
        model=image_request.model.id,
        size=f"{pictures[0].width}x{pictures[0].height}",
        quality=image_request.quality,
        output_format=image_request.format,
        safety_identifier=image_request.user,
        timings=max((output.timings for output in outputs), key=lambda timings: timings.total_s),
        usage=image_request.usage([output.usage for output in outputs]),
        warnings=list(dict.fromkeys(text for part in outputs for text in part.warnings)) or None,
        settings=without_prompts(outputs[0].settings) or None,
    )
