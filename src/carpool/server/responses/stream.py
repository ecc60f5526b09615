"""Server-sent events of one HTTP request: its previews, its pictures, its failure.

The headers wait for the first event, so a request that is refused at once (for example by a full
queue) still gets its status and retry hints. A stream that fails later ends with an `error` event;
every other stream ends with `[DONE]`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from carpool.errors import CarpoolError
from carpool.fleet.fleet import Fleet
from carpool.server.bodies import schema
from carpool.server.image_request import RunInThread, StoreFile
from carpool.telemetry import logs
from carpool.types import CheckedRequest
from carpool.worker import protocol

log = logging.getLogger("carpool")
T = TypeVar("T")
Reply = TypeVar("Reply", covariant=True)

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
"""OpenAPI 3.2 description of an answer that may be a stream of events."""

DONE = format_sse_event(data_str="[DONE]")
DISCONNECTED = 499  # status in logs and metrics
RESTARTED_COMMENT = b": the worker died; the request is run again\n\n"
Shown = protocol.Preview | protocol.Done
Update = tuple[int, Shown] | CarpoolError | bytes
"""An update of one picture, a failure of all, or a comment (a restart's is always sent)."""


class EventStream(EventSourceResponse):
    """A response of server-sent events. A client disconnect cancels its work.

    It sets the scope's `ended_as` to its final status: the HTTP status was sent at its start.
    """

    def __init__(self, first: bytes, tail: AsyncIterator[bytes]) -> None:
        """An answer whose first event is available.

        Args:
            tail: may raise `CarpoolError`, which becomes the last event.
        """
        self._status, self._events = DISCONNECTED, self._all(first, tail)
        super().__init__(self._events, headers=HEADERS)

    async def _all(self, first: bytes, tail: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async with aclosing(tail):  # type: ignore[type-var]
            yield first
            try:
                async for event in tail:
                    yield event
                self._status = 200
            except CarpoolError as error:
                logs.refused(error)
                failure = schema.Error(error=schema.ErrorBody(**error.body)).model_dump_json()
                yield format_sse_event(data_str=failure, event="error")
                self._status = error.status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):  # type: ignore[type-var]
                await super().__call__(scope, receive, send)
        finally:
            scope["ended_as"] = self._status


def is_final(event: bytes) -> bool:
    """Return whether a replay needs this event: it needs no previews."""
    first = event.split(b"\n", 1)[0]  # chat events have no names: all are final
    return first.startswith(b"data:") or first.endswith(b".completed")


class ParsedRequest(Protocol[Reply]):
    """A request for pictures or texts: reading `requests` or `inputs` checks its parameters."""

    @property
    def requests(self) -> Sequence[CheckedRequest]: ...
    @property
    def inputs(self) -> list[Any]: ...  # the input pictures
    @property
    def is_streamed(self) -> bool: ...
    @property
    def is_chat(self) -> bool: ...  # its stream has no event of a rewritten prompt
    def identity(self, **fields: Any) -> dict[str, Any]: ...
    def usage(self, usages: Sequence[protocol.TokenUsage]) -> schema.UsageBody: ...
    def write_event(self, number: int, update: Shown, index: int) -> bytes: ...
    async def answer(
        self, outputs: Sequence[protocol.Done], *, link: StoreFile, run: RunInThread
    ) -> Reply: ...


async def events(
    fleet: Fleet,
    parsed: ParsedRequest[Any],
    *,
    on_output: Callable[[int, schema.UsageBody], None],
    previewed: Callable[[float], None],
    run: RunInThread,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """Run the requests of a generation; yields the bytes of the stream.

    Args:
        on_output: called with each picture and its usage.
        previewed: called with the seconds until the first preview, if there is one.
        run: runs the encoding.
        heartbeat_s: the longest silence.

    Raises:
        CarpoolError: a request failed.
    """
    updates: asyncio.Queue[Update] = asyncio.Queue()
    work = asyncio.create_task(_run(fleet, parsed.requests, updates))
    open_outputs, is_begun, began_s = len(parsed.requests), False, time.monotonic()
    previews, last_step = [0] * open_outputs, [0] * open_outputs  # by picture
    try:
        while open_outputs:
            try:
                async with asyncio.timeout(heartbeat_s):
                    update = await updates.get()
            except TimeoutError:
                update, is_begun = KEEPALIVE_COMMENT, False  # this comment is always sent
            if isinstance(update, CarpoolError):
                raise update
            if isinstance(update, bytes):
                if not is_begun or update is RESTARTED_COMMENT:
                    yield update
            else:
                number, sight = update
                is_prompt = isinstance(sight, protocol.Preview) and sight.is_prompt
                if is_prompt and parsed.is_chat:
                    continue
                is_first = not (is_prompt or any(last_step) or isinstance(sight, protocol.Done))
                if isinstance(sight, protocol.Preview) and not is_prompt:
                    if sight.step <= last_step[number]:
                        continue  # sent before the worker died
                    last_step[number] = sight.step
                write = partial(parsed.write_event, number, sight, previews[number])
                pictures = sight.pictures if isinstance(sight, protocol.Done) else sight.picture
                event = await run(write) if pictures else write()
                if isinstance(sight, protocol.Done):
                    open_outputs -= 1
                    on_output(len(sight.pictures), parsed.usage([sight.usage]))
                if is_first:
                    previewed(time.monotonic() - began_s)
                previews[number] += not is_prompt
                yield event
            is_begun = True
        yield DONE
    finally:
        work.cancel()


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


async def _run(
    fleet: Fleet, requests: Sequence[CheckedRequest], updates: "asyncio.Queue[Update]"
) -> None:
    """Run all requests, and put their previews, outputs or errors into the queue."""

    async def submit(number: int) -> None:
        output = await fleet.submit(
            requests[number],
            on_progress=lambda _, steps: updates.put_nowait(
                KEEPALIVE_COMMENT if steps else RESTARTED_COMMENT
            ),
            on_preview=lambda preview: updates.put_nowait((number, preview)),
        )
        updates.put_nowait((number, output))

    try:
        await gather(submit, len(requests))
    except CarpoolError as error:
        updates.put_nowait(error)
    except Exception as error:
        log.error("a stream failed unexpectedly", exc_info=error)
        updates.put_nowait(CarpoolError("the server failed; its log says more"))
