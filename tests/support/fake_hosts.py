"""A worker's process behind a host, without a process."""

import asyncio
from collections.abc import AsyncIterator, Callable

from carpool.worker import protocol


class FakeChild:
    """A worker's process: says what it is told to, and notes what it gets."""

    end, is_lost, is_explained = "it ended with exit code 7", False, False

    def __init__(self) -> None:
        self.got: list[protocol.ToWorker] = []
        self.told: asyncio.Queue[protocol.ToFront | None] = asyncio.Queue()
        self.is_killed = self.is_closed = False

    def send(self, message: protocol.ToWorker) -> None:
        self.got.append(message)

    async def messages(self) -> AsyncIterator[protocol.ToFront]:
        while (message := await self.told.get()) is not None:
            yield message

    def kill(self) -> None:
        self.is_killed = True
        self.told.put_nowait(None)

    async def close(self) -> None:
        self.is_closed = True
        self.told.put_nowait(None)

    def of(self, kind: type) -> int:
        return sum(isinstance(one, kind) for one in self.got)


async def settle() -> None:
    """Let every task come as far as it can."""
    for _ in range(30):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    """Turn the event loop until something is so."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
