"""Runs a request for pictures or texts, and answers as JSON or events.

Each `Idempotency-Key` runs its request once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from carpool.server.access.idempotency import digest_of, key_of
from carpool.server.bodies import schema
from carpool.server.responses.stream import EventStream, ParsedRequest, events, gather, is_final
from carpool.server.state import AuthenticatedRequest
from carpool.worker import encoding

T = TypeVar("T")


async def respond(
    context: AuthenticatedRequest, parsed: ParsedRequest[T], **fields: Any
) -> T | EventStream:
    """Check the parameters and run the requests while the client is connected.

    Args:
        fields: part of the content that requests with one `Idempotency-Key` must share.

    Raises:
        CarpoolError: the request is invalid or failed.
    """
    state, request, owner = context.state, context.request, context.client.owner
    base, run = str(request.base_url).rstrip("/"), partial(state.encoder.run, owner)
    live: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def answer_once() -> Any:
        await context.check_room()
        if inputs := parsed.inputs:
            await run(lambda: [*map(encoding.pack, inputs)])
        requests = parsed.requests
        state.observer.began(request, owner, requests)
        if not parsed.is_streamed:
            outputs = await gather(lambda n: state.fleet.submit(requests[n]), len(requests))
            return await parsed.answer(
                outputs, link=lambda file, kind: base + state.files.keep(file, kind), run=run
            )
        model = requests[0].model
        stream = events(
            state.fleet,
            parsed,
            on_output=partial(state.observer.drew, model),
            previewed=partial(state.observer.first_preview, model),
            run=run,
        )
        final = []
        async with aclosing(stream):  # type: ignore[type-var]
            async for event in stream:
                live.put_nowait(event)
                final += [event] if is_final(event) else []
        return final

    key = key_of(request)
    digest = "" if key is None else digest_of(request.url.path, parsed.identity(**fields))
    once = partial(state.idempotency.once, owner, key, digest, answer_once)
    if parsed.is_streamed:
        streamed = _live(once, live)
        return EventStream(await context.unless_disconnected(anext(streamed)), streamed)
    answer: T = await context.unless_disconnected(once())  # the digest differs for a stream
    if isinstance(answer, schema.ImagesResponse):
        state.observer.drew(answer.model, len(answer.data), answer.usage)
    return answer


async def _live(
    once: Callable[[], Coroutine[Any, Any, Any]], live: "asyncio.Queue[bytes | None]"
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
        for event in [] if is_live else final:
            yield event
    finally:
        answer.cancel()
