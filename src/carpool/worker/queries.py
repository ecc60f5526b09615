"""Queries from the front to one worker."""

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Any

from carpool.errors import CarpoolError
from carpool.worker import protocol


class Queries:
    """The open queries to one worker, by number.

    Args:
        send: sends a message to the current worker.
    """

    def __init__(self, send: Callable[[protocol.ToWorker], None]) -> None:
        self._send = send
        self._queries: dict[int, asyncio.Future[Any]] = {}
        # not from 1: a worker may still answer an earlier front
        self._numbers = itertools.count(secrets.randbits(32))

    def ask(self, query: protocol.Query) -> "asyncio.Future[Any]":
        """Send a query; resolves to the value of its `Answer`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[number := next(self._numbers)] = future
        self._send(protocol.Ask(number, query))
        return future

    def answered(self, answer: protocol.Answer) -> None:
        query = self._queries.pop(answer.number, None)
        if query is not None and not query.done():
            query.set_result(answer.value)

    def fail(self, error: CarpoolError) -> None:
        """Fail the open queries."""
        for query in self._queries.values():
            if not query.done():
                query.set_exception(error)
        self._queries.clear()
