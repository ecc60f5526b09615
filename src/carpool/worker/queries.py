"""Queries to one worker; it answers each kind in the order of asking."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from carpool.errors import CarpoolError
from carpool.worker import protocol

Query = protocol.GetStatistics | protocol.GetTimelines | protocol.Estimate
Answer = protocol.Statistics | protocol.Timelines | protocol.Estimated


class Queries:
    """The open queries to one worker.

    Args:
        send: sends a message to the present worker.
    """

    def __init__(self, send: Callable[[protocol.ToWorker], None]) -> None:
        self._send = send
        self._queries = deque[asyncio.Future[Any]]()
        self._adding = deque[asyncio.Future[list[str]]]()  # open additions of adapters

    async def ask(self, query: Query) -> Any:
        """Ask the worker; returns statistics, timelines, or an `Estimated`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries.append(future)
        self._send(query)
        return await future

    def add_lora(self, name: str, path: str) -> asyncio.Future[list[str]]:
        """Have an adapter registered; the answer says what is wrong with it."""
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._adding.append(answer)
        self._send(protocol.AddLora(name, path))
        return answer

    def answered(self, message: Answer) -> None:
        """The oldest question is answered."""
        answer: Any = message
        if isinstance(message, protocol.Statistics):
            answer = message.statistics
        elif isinstance(message, protocol.Timelines):
            answer = message.timelines
        query = self._queries.popleft()
        if not query.done():  # its client has gone
            query.set_result(answer)

    def added(self, problems: list[str]) -> None:
        """The oldest addition is answered."""
        if self._adding:
            self._settle(problems)

    def worker_died(self, error: CarpoolError) -> None:
        """Fail the open queries; the successor gets the adapters."""
        while self._adding:
            self._settle([])
        self.fail(error)

    def _settle(self, problems: list[str]) -> None:
        adding = self._adding.popleft()
        if not adding.done():  # its caller waits no more
            adding.set_result(problems)

    def fail(self, error: CarpoolError) -> None:
        while self._queries:
            query = self._queries.popleft()
            if not query.done():
                query.set_exception(error)
