"""Requests in flight, and the order in which they run again after a worker died.

Requests that were running when a worker died are sent to its successor together. Those that `guilt`
suspects run alone, before all others, until they get past the point at which their workers died: if
that worker dies, too, no other request is lost with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from carpool.worker.guilt import CrashEvidence, Death
from carpool.worker.protocol import Submit


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request between its submission and its answer."""

    submit: Submit
    evidence: CrashEvidence = field(default_factory=CrashEvidence)
    is_sent: bool = False  # the current worker has it
    has_started: bool = False  # it has left the worker's queue

    @property
    def request_id(self) -> str:
        return self.submit.request.request_id


T = TypeVar("T", bound=InFlightRequest)


class InFlight(Generic[T]):
    """Unanswered requests, in order of arrival. Sends nothing itself."""

    def __init__(self) -> None:
        self._requests: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> T | None:
        return self._requests.get(request_id)

    def add(self, request: T) -> None:
        """Add a request with a unique id."""
        self._requests[request.request_id] = request

    def remove(self, request: T) -> bool:
        """Remove a request; returns whether it was still in flight."""
        if self._requests.get(request.request_id) is not request:
            return False
        del self._requests[request.request_id]
        return True

    def take_due(self) -> list[T]:
        """Choose the requests to send to a ready worker now, and mark them as sent."""
        suspects = self._suspects()
        if not suspects:
            due = [request for request in self if not request.is_sent]
        elif any(request.is_sent for request in self):
            due = []  # a suspect waits until it can run alone
        else:
            due = [max(suspects, key=lambda request: request.evidence.weight)]
        for request in due:
            request.is_sent = True
        return due

    def take_guilty(self) -> list[T]:
        """Remove and return the guilty requests. Only while no worker runs them.

        The deaths caused by a guilty request count against no other request.
        """
        guilty = [request for request in self if request.evidence.is_guilty]
        for request in guilty:
            request.evidence.explain()
            self.remove(request)
        return guilty

    @property
    def has_suspects(self) -> bool:
        """Whether a request has to run alone."""
        return bool(self._suspects())

    def _suspects(self) -> list[T]:
        return [request for request in self if request.evidence.is_suspect]

    def worker_died(self, death: Death) -> list[T]:
        """Record a death; returns the requests that the worker ran.

        Requests that only waited in the worker's queue are not counted, unless none is known to
        have started: the worker may have died before its report.
        """
        running = [request for request in self if request.is_sent]
        ran = [request for request in running if request.has_started] or running
        death.requests = frozenset(request.request_id for request in ran)
        for request in ran:
            request.evidence.died(death)
        for request in running:
            request.is_sent = request.has_started = False
        return ran
