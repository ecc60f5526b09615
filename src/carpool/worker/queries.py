"""Queries from the front to one worker, and the adapters registered while it runs.

A worker answers in the order of the queries.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from carpool.errors import CarpoolError
from carpool.worker import protocol


class Queries:
    """The open queries to one worker.

    Args:
        send: sends a message to the current worker.
    """

    def __init__(self, send: Callable[[protocol.ToWorker], None]) -> None:
        self._send = send
        self._queries = deque[asyncio.Future[Any]]()

    async def ask(self, query: protocol.Query) -> Any:
        """Send a query; returns the value of its `Answer`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries.append(future)
        self._send(query)
        return await future

    def answered(self, value: Any) -> None:
        """Resolve the oldest query."""
        query = self._queries.popleft()
        if not query.done():
            query.set_result(value)

    def fail(self, error: CarpoolError) -> None:
        """Fail the open queries."""
        while self._queries:
            query = self._queries.popleft()
            if not query.done():
                query.set_exception(error)


class LateAdapters:
    """The adapters registered while one worker and its successors ran.

    A new worker only has the adapters of its settings. It gets the others as soon as it has loaded
    its model, and is ready after it has answered for each.

    Args:
        send: sends a message to the current worker.
    """

    def __init__(self, send: Callable[[protocol.ToWorker], None]) -> None:
        self._send = send
        self._paths: dict[str, str] = {}
        # not yet answered by the current worker
        self._adding = deque[tuple[str, str, asyncio.Future[list[str]]]]()
        self._arriving: protocol.WorkerReady | None = None  # a new worker with unanswered adapters
        self._unanswered = 0

    def add(self, name: str, path: str, *, is_ready: bool) -> "asyncio.Future[list[str]]":
        """Register an adapter; it is dropped if the answer lists problems.

        A worker that is not ready gets the adapter after loading; then there is no answer.
        """
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        if is_ready:
            self._adding.append((name, path, answer))
            self._send(protocol.AddLora(name, path))
        else:
            self._paths[name] = path
            answer.set_result([])
        return answer

    def added(self, problems: list[str]) -> None:
        """Handle the worker's answer for the oldest adapter."""
        if not self._adding:
            return
        name, path, answer = self._adding.popleft()
        if answer.done():  # its caller waits no more
            return
        answer.set_result(problems)
        if not problems:
            self._paths[name] = path

    def send_all(self, ready: protocol.WorkerReady) -> protocol.WorkerReady | None:
        """Send all adapters to a worker that has loaded; None: its answers are pending."""
        if not self._paths:
            return ready
        self._arriving, self._unanswered = ready, len(self._paths)
        for name, path in self._paths.items():
            self._send(protocol.AddLora(name, path))
        return None

    def answered(self, message: protocol.Reloaded) -> protocol.WorkerReady | None:
        """Handle an answer of the new worker; returns it once it has all adapters."""
        assert self._arriving is not None
        self._arriving = self._arriving.now(message.card)
        self._unanswered -= message.is_addition
        if self._unanswered:
            return None
        ready, self._arriving = self._arriving, None
        return ready

    @property
    def is_sending(self) -> bool:
        return self._arriving is not None

    def worker_died(self) -> None:
        """Keep pending adapters for the successor."""
        self._arriving = None
        while self._adding:
            self.added([])
