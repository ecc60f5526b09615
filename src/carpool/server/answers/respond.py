"""Answer a request for pictures, once for each `Idempotency-Key`: as JSON or a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from carpool.errors import Cancelled
from carpool.server.access.idempotency import digest_of, key_of
from carpool.server.answers.generation import ImageGeneration, generate
from carpool.server.answers.stream import EventStream, events, is_final
from carpool.server.bodies import schema
from carpool.server.state import AuthenticatedRequest, Replay

T = TypeVar("T")


async def respond(
    context: AuthenticatedRequest,
    sent: Callable[[], Any],
    make: Callable[[], ImageGeneration],
    *,
    is_streamed: bool | None,
) -> schema.ImagesResponse | EventStream:
    """Run a generation for as long as the client is connected.

    Args:
        sent: what the client asked for, as JSON: with the same `Idempotency-Key` it must be the
            same.
        make: checks the request.

    Raises:
        CarpoolError: whatever is wrong with the request, or became of it.
    """
    state, request, owner = context.state, context.request, context.client.owner
    base, run = str(request.base_url).rstrip("/"), partial(state.encoder.run, owner)
    live: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def checked() -> ImageGeneration:
        await context.check_room()
        generation = make()
        if generation.inputs:
            await run(generation.pack)
        state.observer.began(request, owner, generation.requests)
        return generation

    async def work() -> Replay:
        generation = await checked()
        if not is_streamed:
            return await generate(
                state.supervisor,
                generation,
                link=lambda file: base + state.files.keep(file, generation.format),
                run=run,
            )
        told = events(
            state.supervisor,
            generation,
            drew=state.observer.drew,
            previewed=state.observer.first_preview,
            run=run,
        )
        final = []
        async with aclosing(told):  # type: ignore[type-var]
            async for event in told:
                live.put_nowait(event)
                final += [event] if is_final(event) else []
        return final

    key = key_of(request)
    digest = "" if key is None else digest_of(request.url.path, sent())
    once = partial(state.idempotency.once, owner, key, digest, work)
    if is_streamed:
        streamed = _live(once, live)
        return EventStream(await unless_disconnected(request, anext(streamed)), streamed)
    response = await unless_disconnected(request, once())
    assert isinstance(response, schema.ImagesResponse)  # by the digest: no stream's
    state.observer.drew(len(response.data), response.usage)
    return response


async def _live(
    once: Callable[[], Coroutine[Any, Any, Replay]], live: "asyncio.Queue[bytes | None]"
) -> AsyncIterator[bytes]:
    """The events of this request as they come; or of an earlier one, the final events."""
    answer = asyncio.create_task(once())
    answer.add_done_callback(lambda _: live.put_nowait(None))
    is_live = False
    try:
        while (event := await live.get()) is not None:
            is_live = True
            yield event
        final = await answer
        assert isinstance(final, list)  # by the digest: a stream's
        for event in [] if is_live else final:
            yield event
    finally:
        answer.cancel()


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Do the work, or raise Cancelled as soon as the client disconnects."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
