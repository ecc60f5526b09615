"""Requests in flight, and the rules by which they are run again after a worker died.

Requests that were running when a worker died are sent to its successor again, together, at most
`MAX_RERUNS` times. A request that was running at the death of `SUSPECT_DEATHS` workers is run
alone, before all others: if that worker dies as well, no other request is lost with it, and this
one fails. So each death brings some request closer to its failure, and all others are answered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from carpool.worker.protocol import Submit

SUSPECT_DEATHS = 2
MAX_RERUNS = 2


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request from its submission to its answer."""

    submit: Submit
    deaths: int = 0  # of workers that ran it
    is_sent: bool = False  # the present worker has it
    has_started: bool = False  # it left the worker's queue
    has_advanced: bool = False  # the present worker has added to its journal

    @property
    def id(self) -> str:
        return self.submit.request.request_id


T = TypeVar("T", bound=InFlightRequest)


class InFlight(Generic[T]):
    """Requests that wait for an answer, in the order of their arrival. Sends nothing itself."""

    def __init__(self) -> None:
        self._requests: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> T | None:
        return self._requests.get(request_id)

    def add(self, request: T) -> None:
        """Add a request whose id no other one in flight has."""
        self._requests[request.id] = request

    def remove(self, request: T) -> bool:
        """Remove a request; returns whether it was still in flight."""
        if self._requests.get(request.id) is not request:
            return False
        del self._requests[request.id]
        return True

    def take_due(self) -> list[T]:
        """Choose what to send to a ready worker now, and mark it as sent."""
        suspects = [one for one in self if one.deaths >= SUSPECT_DEATHS]
        if not suspects:
            due = [one for one in self if not one.is_sent]
        elif any(one.is_sent for one in self):
            due = []  # a suspect waits until it is alone
        else:
            due = suspects[:1]
        for one in due:
            one.is_sent = True
        return due

    @property
    def has_suspects(self) -> bool:
        """Whether a request is to be run alone."""
        return any(one.deaths >= SUSPECT_DEATHS for one in self._requests.values())

    def worker_died(self) -> list[T]:
        """Count a death, and remove and return the requests that were part of too many.

        Requests that only waited in the worker's queue are not counted, unless none is known to
        have started: the worker may have died before it could say.
        """
        sent = [one for one in self if one.is_sent]
        for one in [one for one in sent if one.has_started] or sent:
            one.deaths += 1
        for one in sent:
            one.is_sent = one.has_started = one.has_advanced = False
        guilty = [one for one in self if one.deaths > MAX_RERUNS]
        for one in guilty:
            self.remove(one)
        return guilty
