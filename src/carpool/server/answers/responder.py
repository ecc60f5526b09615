"""Answers a request for pictures: as JSON, as links or as a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from carpool.errors import Cancelled
from carpool.media.executors import FairExecutor
from carpool.media.reader import Intake, PictureReader
from carpool.server.access.idempotency import Answers, digest_of, key_of
from carpool.server.access.keys import Client
from carpool.server.answers.signed_links import Files
from carpool.server.answers.stream import Stream, events, is_lasting
from carpool.server.bodies import schema
from carpool.server.routes.images import Drawing, Served, draw, pack
from carpool.server.routes.observe import Observer
from carpool.telemetry import tracing
from carpool.worker.supervisor import Supervisor

T = TypeVar("T")
Answer = schema.ImagesResponse | list[bytes]
"""What is told again to who asks again: JSON, or the lasting events of a stream."""

Work = Coroutine[Any, Any, Answer]


@dataclass(frozen=True, slots=True)
class Studio:
    """What the routes of pictures need."""

    supervisor: Supervisor
    observer: Observer
    answers: Answers[Answer]
    files: Files
    served: Callable[[], Served]  # may raise: nothing can be drawn now
    check_room: Callable[[Request, Client], Awaitable[None]]  # raises where there is none
    reader: PictureReader  # of pictures that clients send
    encoder: FairExecutor  # of those that they get

    def intake(self, request: Request, tenant: str, n: int) -> Intake:
        """Reads the pictures of a request for `n` outputs."""
        return Intake(self.reader, tenant, request.state.held, n)

    async def answer(
        self,
        request: Request,
        client: Client,
        sent: Callable[[], Any],
        make: Callable[[], Drawing],
        *,
        is_streamed: bool | None,
    ) -> schema.ImagesResponse | Stream:
        """Run the jobs, for as long as the client is there.

        Args:
            sent: what the client asked for, as JSON: with the same `Idempotency-Key` it must be
                the same.
            make: checks the request.
            is_streamed: is the answer one of events?

        Raises:
            CarpoolError: whatever is wrong with the request, or became of it.
        """
        if is_streamed:
            told = self._events(request, client, sent, make)
            return Stream(await unless_gone(request, anext(told)), told)
        base = str(request.base_url).rstrip("/")

        async def work() -> schema.ImagesResponse:
            drawing = await self._drawing(request, client, make)

            def link(file: bytes) -> str:
                return base + self.files.keep(file, drawing.format)

            run = partial(self.encoder.run, client.owner)
            return await draw(self.supervisor, drawing, link=link, run=run)

        answer = await unless_gone(request, self._once(request, client, sent, work))
        assert isinstance(answer, schema.ImagesResponse)  # by the digest: no stream's
        self._drew(len(answer.data), answer.usage)
        return answer

    async def _drawing(
        self, request: Request, client: Client, make: Callable[[], Drawing]
    ) -> Drawing:
        await self.check_room(request, client)
        drawing = make()
        if drawing.has_pictures:
            await self.encoder.run(client.owner, partial(pack, drawing))
        self.observer.began(request, client.owner, drawing.jobs)
        return drawing

    async def _events(
        self, request: Request, client: Client, sent: Callable[[], Any], make: Callable[[], Drawing]
    ) -> AsyncIterator[bytes]:
        """A stream's events as they come; of one that was asked for before, those that last."""
        live: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def work() -> list[bytes]:
            drawing = await self._drawing(request, client, make)
            told = events(
                self.supervisor,
                drawing,
                drew=self._drew,
                previewed=self.observer.previewed,
                run=partial(self.encoder.run, client.owner),
            )
            lasting = []
            async with aclosing(told):  # type: ignore[type-var]
                async for event in told:
                    live.put_nowait(event)
                    lasting += [event] if is_lasting(event) else []
            return lasting

        once = asyncio.create_task(self._once(request, client, sent, work))
        once.add_done_callback(lambda _: live.put_nowait(None))
        is_live = False
        try:
            while (event := await live.get()) is not None:
                is_live = True
                yield event
            lasting = await once
            assert isinstance(lasting, list)  # by the digest: a stream's
            for event in [] if is_live else lasting:
                yield event
        finally:
            once.cancel()

    def _once(
        self,
        request: Request,
        client: Client,
        sent: Callable[[], Any],
        work: Callable[[], Work],
    ) -> Coroutine[Any, Any, Answer]:
        key = key_of(request)
        digest = "" if key is None else digest_of(request.url.path, sent())
        return self.answers.once(client.owner, key, digest, work)

    def _drew(self, images: int, usage: schema.Usage) -> None:
        self.observer.drew(images)
        tracing.used(usage.input_tokens, usage.output_tokens)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Do the work, but give it up as soon as the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
