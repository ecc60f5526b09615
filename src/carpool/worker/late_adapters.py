"""Adapters that were registered while the server runs, given to every worker that starts later.

A new worker has only the adapters of its settings. It gets the others as soon as it has loaded
its model, and is ready once it has answered for each.
"""

import asyncio
from collections.abc import Callable

from carpool.worker import protocol
from carpool.worker.queries import Queries


class LateAdapters:
    """The adapters of one worker and its successors.

    Args:
        send: sends a message to the present worker.
    """

    def __init__(self, queries: Queries, send: Callable[[protocol.ToWorker], None]) -> None:
        self._queries, self._send = queries, send
        self._paths: dict[str, str] = {}
        self._arriving: protocol.WorkerReady | None = None  # a worker that has not answered for all
        self._unanswered = 0

    def add(self, name: str, path: str, *, is_ready: bool) -> "asyncio.Future[list[str]]":
        """Register an adapter; it is forgotten if the answer lists problems.

        A worker that is not ready answers nothing: it gets the adapter after it has loaded.
        """
        if is_ready:
            answer = self._queries.add_lora(name, path)
            answer.add_done_callback(lambda answer: self._added(answer, name, path))
        else:
            self._paths[name] = path
            answer = asyncio.get_running_loop().create_future()
            answer.set_result([])
        return answer

    def _added(self, answer: "asyncio.Future[list[str]]", name: str, path: str) -> None:
        if not answer.cancelled() and not answer.result():
            self._paths[name] = path

    def send_all(self, ready: protocol.WorkerReady) -> protocol.WorkerReady | None:
        """Send all adapters to a worker that has loaded its model; None: it has to answer first."""
        if not self._paths:
            return ready
        self._arriving, self._unanswered = ready, len(self._paths)
        for name, path in self._paths.items():
            self._send(protocol.AddLora(name, path))
        return None

    def answered(self, message: protocol.Reloaded) -> protocol.WorkerReady | None:
        """Take an answer of the arriving worker; returns it once it has all adapters."""
        assert self._arriving is not None
        self._arriving = self._arriving.with_card(message.card)
        self._unanswered -= message.is_addition
        if self._unanswered:
            return None
        ready, self._arriving = self._arriving, None
        return ready

    @property
    def is_sending(self) -> bool:
        return self._arriving is not None

    def worker_died(self) -> None:
        self._arriving = None
