"""Server-sent events of one HTTP request: its previews, its pictures, its failure.

The answer's headers wait for the first news, so that what is refused at once, by a full queue
say, still gets its status and retry hints. A stream that has begun and fails ends with an `error`
event; every other one ends with `[DONE]`.
"""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from carpool.errors import CarpoolError
from carpool.server.bodies import schema
from carpool.server.routes.images import Drawing, Run
from carpool.worker import protocol
from carpool.worker.supervisor import Supervisor

log = logging.getLogger("carpool")

HEARTBEAT_S = 15.0
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}
}
"""For the OpenAPI document: a successful answer may be a stream, of events, as in OpenAPI 3.2."""

DONE = format_sse_event(data_str="[DONE]")
GONE = 499  # nobody's status: the client left
AGAIN_COMMENT = b": the worker died; the request is run again\n\n"
Seen = protocol.Preview | protocol.Done
News = tuple[int, Seen] | CarpoolError | bytes
"""Of one of the pictures, a failure of all, or a comment; only one about trouble is always told."""


class Stream(EventSourceResponse):
    """An answer whose work is given up as soon as the client hangs up.

    How it ended stands in the scope as `ended_as`, a status: the answer's own was sent long before.
    """

    def __init__(self, first: bytes, others: AsyncIterator[bytes]) -> None:
        """An answer of events, the first of which there is already.

        Args:
            others: may raise `CarpoolError`, which becomes the last event.
        """
        self._status, self._events = GONE, self._told(first, others)
        super().__init__(self._events, headers=HEADERS)

    async def _told(self, first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async with aclosing(others):  # type: ignore[type-var]
            yield first
            try:
                async for event in others:
                    yield event
                self._status = 200
            except CarpoolError as error:
                yield _failure(error)
                self._status = error.status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):  # type: ignore[type-var]
                await super().__call__(scope, receive, send)
        finally:
            scope["ended_as"] = self._status


def is_lasting(event: bytes) -> bool:
    """Whether an event is still worth telling when all is over."""
    return event == DONE or event.split(b"\n", 1)[0].endswith(b".completed")


async def events(
    supervisor: Supervisor,
    drawing: Drawing,
    *,
    drew: Callable[[int, schema.Usage], None],
    previewed: Callable[[float], None],
    run: Run,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """Run the jobs of a request and tell of them, as the stream's bytes.

    Args:
        drew: hears of every picture and what it used.
        previewed: hears after how many seconds the first preview is sent, if any is.
        run: runs the encoding.
        heartbeat_s: the longest silence.

    Raises:
        CarpoolError: one failed.
    """
    news: asyncio.Queue[News] = asyncio.Queue()
    work = asyncio.create_task(_run(supervisor, drawing, news))
    left, is_begun, began_s = len(drawing.jobs), False, time.monotonic()
    shown, last = [0] * left, [0] * left  # previews of each; the step of the last one
    try:
        while left:
            try:
                async with asyncio.timeout(heartbeat_s):
                    item = await news.get()
            except TimeoutError:
                is_begun = True
                yield KEEPALIVE_COMMENT
                continue
            if isinstance(item, CarpoolError):
                raise item
            if isinstance(item, bytes):
                if not is_begun or item is AGAIN_COMMENT:
                    yield item
            else:
                number, seen = item
                if isinstance(seen, protocol.Preview):
                    if seen.step <= last[number]:
                        continue  # shown before the worker died
                    is_first, last[number] = not any(last), seen.step
                else:
                    is_first = False
                    left -= 1
                    drew(1, drawing.usage([seen.usage]))
                event = await run(partial(_event, drawing, number, seen, shown[number]))
                if is_first:
                    previewed(time.monotonic() - began_s)
                shown[number] += 1
                yield event
            is_begun = True
        yield DONE
    finally:
        work.cancel()


async def _run(supervisor: Supervisor, drawing: Drawing, news: "asyncio.Queue[News]") -> None:
    """Run all jobs side by side. If one fails, the others are given up."""

    def viewed(number: int, preview: protocol.Preview) -> None:
        news.put_nowait((number, preview))

    async def one(number: int) -> None:
        done = await supervisor.submit(
            drawing.jobs[number],
            on_progress=lambda _, steps: news.put_nowait(
                KEEPALIVE_COMMENT if steps else AGAIN_COMMENT
            ),
            on_preview=partial(viewed, number),
        )
        news.put_nowait((number, done))

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(len(drawing.jobs)):
                group.create_task(one(number))
                await asyncio.sleep(0)  # pictures that it brings take milliseconds to send
    except ExceptionGroup as failures:
        error = failures.exceptions[0]
        if not isinstance(error, CarpoolError):
            log.error("a stream failed unexpectedly", exc_info=error)
            error = CarpoolError("the server failed; its log says more")
        news.put_nowait(error)


def _event(drawing: Drawing, number: int, seen: Seen, index: int) -> bytes:
    """A picture as an event; encodes it, so not on the event loop."""
    picture = seen.pictures[0] if isinstance(seen, protocol.Done) else seen.picture
    content = drawing.encoded(number, picture, is_final=isinstance(seen, protocol.Done))
    common: dict[str, Any] = {
        "b64_json": base64.b64encode(content).decode(),
        "created_at": int(time.time()),
        "size": f"{picture.width}x{picture.height}",
        "quality": drawing.quality,
        "background": "opaque",
        "output_format": drawing.format,
        "seed": drawing.jobs[number].seed,
        "image_index": number,
    }
    event: schema.PartialImage | schema.CompletedImage
    if isinstance(seen, protocol.Done):
        event = schema.CompletedImage(
            type=f"{drawing.kind}.completed",
            usage=drawing.usage([seen.usage]),
            safety_identifier=drawing.user,
            timings=seen.timings,
            **common,
        )
    else:
        event = schema.PartialImage(
            type=f"{drawing.kind}.partial_image",
            partial_image_index=index,
            step=seen.step,
            steps=seen.steps,
            **common,
        )
    return format_sse_event(data_str=event.model_dump_json(exclude_none=True), event=event.type)


def _failure(error: CarpoolError) -> bytes:
    told = schema.ErrorBody(**error.body)
    return format_sse_event(data_str=schema.Error(error=told).model_dump_json(), event="error")
