"""Requests in flight, and the order in which they run again after a worker died.

Requests that were running when a worker died are sent to its successor together. Those that `guilt`
suspects run alone, before all others, until they get past the point at which their workers died: if
that worker dies, too, no other request is lost with it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from carpool.types import OnProgress
from carpool.worker.guilt import CrashEvidence, Death
from carpool.worker.protocol import Done, Preview, Submit

OnPreview = Callable[[Preview], None]


@dataclass(slots=True, eq=False)
class RequestInFlight:
    """A request between its submission and its answer."""

    submit: Submit
    answer: asyncio.Future[Done]
    evidence: CrashEvidence = field(default_factory=CrashEvidence)
    on_progress: OnProgress | None = None
    on_preview: OnPreview | None = None
    came_s: float = 0.0  # arrival; event loop's clock
    is_sent: bool = False  # the current worker has it
    has_started: bool = False  # it has left the worker's queue

    @property
    def request_id(self) -> str:
        return self.submit.request.request_id

    def resolve(self, answer: Done | Exception) -> None:
        if self.answer.done():  # its client has gone
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class InFlight(dict[str, RequestInFlight]):
    """Unanswered requests by id, in order of arrival. Sends nothing itself."""

    def remove(self, request: RequestInFlight) -> bool:
        """Remove a request; returns whether it was still in flight."""
        if self.get(request.request_id) is not request:
            return False
        del self[request.request_id]
        return True

    def take_due(self) -> list[RequestInFlight]:
        """Choose the requests to send to a ready worker now, and mark them as sent."""
        suspects = self._suspects()
        if not suspects:
            due = [request for request in self.values() if not request.is_sent]
        elif any(request.is_sent for request in self.values()):
            due = []  # a suspect waits until it can run alone
        else:
            due = [max(suspects, key=lambda request: request.evidence.weight)]
        for request in due:
            request.is_sent = True
        return due

    def take_guilty(self) -> list[RequestInFlight]:
        """Remove and return the guilty requests. Only while no worker runs them.

        The deaths caused by a guilty request count against no other request.
        """
        guilty = [request for request in self.values() if request.evidence.is_guilty]
        for request in guilty:
            request.evidence.explain()
            self.remove(request)
        return guilty

    @property
    def has_suspects(self) -> bool:
        """Whether a request has to run alone."""
        return bool(self._suspects())

    def _suspects(self) -> list[RequestInFlight]:
        return [request for request in self.values() if request.evidence.is_suspect]

    def worker_died(self, death: Death) -> list[RequestInFlight]:
        """Record a death; returns the requests that the worker ran.

        Requests that only waited in the worker's queue are not counted, unless none is known to
        have started: the worker may have died before its report.
        """
        running = [request for request in self.values() if request.is_sent]
        ran = [request for request in running if request.has_started] or running
        death.requests = frozenset(request.request_id for request in ran)
        for request in ran:
            request.evidence.died(death)
        for request in running:
            request.is_sent = request.has_started = False
        return ran
