"""Who is in flight, and who goes to the next worker after one has died.

Requests that were running when a worker died go to its successor again, together, at most `RERUNS`
times. Who was running at the death of `SUSPECT` workers is run alone, before all others: if it
kills again, nobody else is lost with it, and it fails. So every death brings somebody nearer to the
end, and whoever is innocent is answered.
"""

from dataclasses import dataclass

from carpool.worker.protocol import Submit

SUSPECT = 2  # deaths
RERUNS = 2


@dataclass(slots=True)
class _Passenger:
    submit: Submit
    deaths: int = 0  # of workers that ran it
    is_sent: bool = False
    has_started: bool = False


class Manifest:
    """Requests that wait for an answer, in the order of their coming. Sends nothing itself."""

    def __init__(self) -> None:
        self._all: dict[str, _Passenger] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, submit: Submit) -> None:
        """A request comes; one with the same id must not wait already."""
        self._all[submit.job.request_id] = _Passenger(submit)

    def started(self, request_id: str) -> None:
        """The worker has taken a request out of its line."""
        if request_id in self._all:
            self._all[request_id].has_started = True

    def remove(self, request_id: str) -> bool:
        """A request was answered or given up; says whether the worker has it."""
        passenger = self._all.pop(request_id, None)
        return passenger is not None and passenger.is_sent

    def due(self) -> list[Submit]:
        """What to send to a worker that is ready, now; counts as sent."""
        suspects = [one for one in self._all.values() if one.deaths >= SUSPECT]
        if not suspects:
            due = [one for one in self._all.values() if not one.is_sent]
        elif any(one.is_sent for one in self._all.values()):
            due = []  # until it is alone
        else:
            due = suspects[:1]
        for one in due:
            one.is_sent = True
        return [one.submit for one in due]

    def died(self) -> list[str]:
        """The worker is dead. Gives those that have killed too often, and forgets them.

        Who only waited in its line is not to blame, unless nobody is known to have started: it may
        have died before it could say who.
        """
        sent = [one for one in self._all.values() if one.is_sent]
        for one in [one for one in sent if one.has_started] or sent:
            one.deaths += 1
        for one in sent:
            one.is_sent = one.has_started = False
        guilty = [request_id for request_id, one in self._all.items() if one.deaths > RERUNS]
        for request_id in guilty:
            del self._all[request_id]
        return guilty
