"""Answers a request for pictures, as JSON or events, once for each `Idempotency-Key`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

from carpool.server.access.idempotency import digest_of, key_of
from carpool.server.bodies import schema
from carpool.server.image_request import ParsedImageRequest
from carpool.server.responses.generation import generate
from carpool.server.responses.stream import EventStream, events, is_final
from carpool.server.state import AuthenticatedRequest, Replay


async def respond(
    context: AuthenticatedRequest, image_request: ParsedImageRequest, **fields: Any
) -> schema.ImagesResponse | EventStream:
    """Check the parameters and run the requests while the client is connected.

    Args:
        fields: part of the content that requests with one `Idempotency-Key` must share.

    Raises:
        CarpoolError: the request is invalid or failed.
    """
    state, request, owner = context.state, context.request, context.client.owner
    is_streamed = image_request.body.stream
    base, run = str(request.base_url).rstrip("/"), partial(state.encoder.run, owner)
    live: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def answer_once() -> Replay:
        await context.check_room()
        if image_request.inputs:
            await run(image_request.pack)
        state.observer.began(request, owner, image_request.requests)
        if not is_streamed:
            return await generate(
                state.backend,
                image_request,
                link=lambda file: base + state.files.keep(file, image_request.format),
                run=run,
            )
        stream = events(
            state.backend,
            image_request,
            on_output=partial(state.observer.drew, image_request.model.id),
            previewed=partial(state.observer.first_preview, image_request.model.id),
            run=run,
        )
        final = []
        async with aclosing(stream):  # type: ignore[type-var]
            async for event in stream:
                live.put_nowait(event)
                final += [event] if is_final(event) else []
        return final

    identity = partial(image_request.identity, **fields)
    response = await answer_by_key(context, identity, answer_once, live if is_streamed else None)
    if isinstance(response, EventStream):
        return response
    assert isinstance(response, schema.ImagesResponse)  # the digest differs for a stream
    state.observer.drew(image_request.model.id, len(response.data), response.usage)
    return response


async def answer_by_key(
    context: AuthenticatedRequest,
    identity: Callable[[], dict[str, Any]],
    work: Callable[[], Coroutine[Any, Any, Replay]],
    live: "asyncio.Queue[bytes | None] | None",
) -> Replay | EventStream:
    """Run work once for each `Idempotency-Key`, while the client is connected.

    Args:
        identity: returns the content that requests with the same key must share.
        live: gets the events of a stream; None: the answer is no stream.
    """
    state, request = context.state, context.request
    key = key_of(request)
    digest = "" if key is None else digest_of(request.url.path, identity())
    once = partial(state.idempotency.once, context.client.owner, key, digest, work)
    if live is None:
        return await context.unless_disconnected(once())
    streamed = _live(once, live)
    return EventStream(await context.unless_disconnected(anext(streamed)), streamed)


async def _live(
    once: Callable[[], Coroutine[Any, Any, Replay]], live: "asyncio.Queue[bytes | None]"
) -> AsyncIterator[bytes]:
    """Yield this request's events live, or the stored final events of an earlier request."""
    answer = asyncio.create_task(once())
    answer.add_done_callback(lambda _: live.put_nowait(None))
    is_live = False
    try:
        while (event := await live.get()) is not None:
            is_live = True
            yield event
        final = await answer
        assert isinstance(final, list)  # only streams have this digest
        for event in [] if is_live else final:
            yield event
    finally:
        answer.cancel()
