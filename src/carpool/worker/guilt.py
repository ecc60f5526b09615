"""The rule of guilt: which request is to blame for the deaths of workers. No clock, no messages.

A request that kills its workers (a poison pill) does so at one point of its work, in any company.
Workers also die of external causes. So a death counts against a request at the point that the
request had reached, until a run of it gets past that point, and never if the death is explained:
its fork server or its node ended, several workers died at once, or requests on one thread were
deadlocked. Requests with `SUSPECT_DEATHS` at one point run alone, so that a further death is
clearer evidence. Only deaths at the furthest point make a request guilty: at an earlier point, such
as during the replay of its journal, it has already shown that it does not kill. Such deaths count
against its journal.
"""

from collections import defaultdict
from dataclasses import dataclass, field

SUSPECT_DEATHS = 2  # at one point. With 1 each death serialises a batch; with 4, poison kills more
GUILTY_DEATHS = 3  # at one point. With 2, an operator's two kills fail a request; with 6 see above
ALONE_DEATHS = 2  # deaths alone in the worker. With 1, chance suffices
MOST_LIVES = 20  # workers in a row without progress, for any cause: ends every loop
AT_ONCE_S = 0.5  # between deaths of one cause: a process with much memory ends slowly


@dataclass(slots=True, eq=False)
class Death:
    """The death of a worker, shared by the evidence of all requests that it ran."""

    worker: object  # its identity, across restarts
    at_s: float
    is_explained: bool = False  # external cause, or another request is guilty
    requests: frozenset[str] = frozenset()  # ids of the requests that it ran

    @property
    def was_alone(self) -> bool:
        return len(self.requests) == 1


@dataclass(slots=True, eq=False)
class Deadlock:
    """The deadlock of a model's workers; after the first one, its requests ride privately."""

    place: str = ""  # line of a worker's deadlock; empty: none


class DeathLog:
    """The recent deaths of all workers of a server; simultaneous deaths are explained.

    Deaths with a common request are not: it may have killed one worker after the other.
    """

    def __init__(self) -> None:
        self._recent: list[Death] = []

    def add(self, death: Death) -> None:
        """Add the newest death."""
        self._recent = [recent for recent in self._recent if death.at_s - recent.at_s <= AT_ONCE_S]
        company = [
            recent
            for recent in self._recent
            if recent.worker is not death.worker and recent.requests.isdisjoint(death.requests)
        ]
        for member in [*company, death] if company else []:
            member.is_explained = True
        self._recent.append(death)


@dataclass(slots=True, eq=False)
class CrashEvidence:
    """The evidence against one request, over all workers that ran it."""

    position: int = 0  # answered calls (steps, without a journal) in the current run, as reported
    peak: int = 0  # the furthest position of any run
    lives: int = 0  # worker deaths since the last progress beyond the peak
    deaths: list[tuple[int, Death]] = field(default_factory=list)  # at points not passed since

    def begins(self, journal_end: int) -> None:
        """Record that a worker gets the request, with a journal up to this call, or 0.

        The worker reports when it has replayed it.
        """
        self.position, self.peak = 0, max(self.peak, journal_end)

    def reached(self, position: int) -> None:
        """Record progress; a lower position means that the run started over."""
        self.position = position
        if position > self.peak:
            self.peak, self.lives = position, 0
        if self.deaths:
            self.deaths = [entry for entry in self.deaths if entry[0] >= position]

    def died(self, death: Death) -> None:
        """Record the death of a worker that ran the request."""
        self.lives += 1
        self.deaths.append((self.position, death))

    @property
    def is_suspect(self) -> bool:
        """Whether the request has to run alone."""
        return self.weight[1] >= SUSPECT_DEATHS

    @property
    def is_guilty(self) -> bool:
        """Whether the request has to fail."""
        deaths = self._unexplained()[self.peak] if self.deaths else []
        return self.is_stuck or (len(deaths) >= GUILTY_DEATHS and _alone(deaths) >= ALONE_DEATHS)

    @property
    def is_stuck(self) -> bool:
        """Whether it has to fail though the deaths may have other causes."""
        return self.lives >= MOST_LIVES

    @property
    def is_journal_suspect(self) -> bool:
        """Whether to drop its journal, which may have killed its workers.

        That is before the death that would make the request guilty, and after as many at one
        earlier point.
        """
        point = self.deaths[-1][0] if self.deaths else 0
        deaths, rest = self._unexplained()[point], int(point == self.peak)
        return len(deaths) >= GUILTY_DEATHS - rest and _alone(deaths) >= ALONE_DEATHS - rest

    @property
    def weight(self) -> tuple[int, int]:
        """The maximum of deaths at one point: alone in the worker, and in total."""
        points = self._unexplained().values() if self.deaths else ()
        return max(((_alone(deaths), len(deaths)) for deaths in points), default=(0, 0))

    def explain(self) -> None:
        """Mark a guilty request's deaths as explained, so that they count against no other one."""
        for _, death in self.deaths:
            death.is_explained = True

    def _unexplained(self) -> dict[int, list[Death]]:
        """Unexplained deaths by point."""
        points = defaultdict[int, list[Death]](list)
        for position, death in self.deaths:
            if not death.is_explained:
                points[position].append(death)
        return points


def _alone(deaths: list[Death]) -> int:
    return sum(death.was_alone for death in deaths)
