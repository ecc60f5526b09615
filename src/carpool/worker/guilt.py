"""The rule of guilt: which request is to blame for the deaths of workers. No clock, no messages.

A request that kills its workers (a poison pill) does so at one point of its work, in any company.
Workers also die of causes outside of them. So a death counts against a request at the point that
the request had reached, until a run of it gets past that point, and never where the death is
explained: its fork server or its node ended, several workers died at once, or requests that shared
its thread waited for each other. Requests with `SUSPECT_DEATHS` at one point run alone, so that a
further death is clearer evidence. Only deaths where no run got further make a request guilty: at an
earlier point, as while its journal is replayed, it has proven before that it does not kill there.
Such deaths count against its journal.
"""

from collections import defaultdict
from dataclasses import dataclass, field

SUSPECT_DEATHS = 2  # at one point. With 1 each death serialises a batch; with 4 a poison ends more
GUILTY_DEATHS = 3  # at one point. With 2 an operator's two kills fail a request; with 6 see above
ALONE_DEATHS = 2  # deaths alone in the worker. With 1, chance is enough
MOST_LIVES = 20  # workers in a row without progress, however they died: so every loop ends
AT_ONCE_S = 0.5  # between deaths of one cause: a process with much memory takes long to end


@dataclass(slots=True, eq=False)
class Death:
    """The death of a worker, shared by the evidence of all requests that it ran."""

    worker: object  # its identity, over restarts
    at_s: float
    is_explained: bool = False  # its cause lies outside, or another request is guilty
    requests: frozenset[str] = frozenset()  # the ids of those that it ran

    @property
    def was_alone(self) -> bool:
        return len(self.requests) == 1


@dataclass(slots=True, eq=False)
class Deadlock:
    """The deadlock of a model's workers; from the first one on its requests ride privately."""

    place: str = ""  # the line at which a worker stood still; empty: none has


class DeathLog:
    """The recent deaths of all workers of a server: those of several at once are explained.

    Deaths that have a request in common are not: it may have killed one worker after the other.
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

    position: int = 0  # answered calls (steps, without a journal) in the present run, as told
    peak: int = 0  # in any run
    lives: int = 0  # workers that died since it got further than ever
    deaths: list[tuple[int, Death]] = field(default_factory=list)  # at points not passed since

    def begins(self, journal_end: int) -> None:
        """Note that a worker gets the request, to replay a journal up to this call, or 0.

        The worker reports when it has reached it.
        """
        self.position, self.peak = 0, max(self.peak, journal_end)

    def reached(self, position: int) -> None:
        """Note progress; a lower position than before: the run started over."""
        self.position = position
        if position > self.peak:
            self.peak, self.lives = position, 0
        if self.deaths:
            self.deaths = [entry for entry in self.deaths if entry[0] >= position]

    def died(self, death: Death) -> None:
        """Note that a worker died which ran the request."""
        self.lives += 1
        self.deaths.append((self.position, death))

    @property
    def is_suspect(self) -> bool:
        """Whether the request is to run alone."""
        return self.weight[1] >= SUSPECT_DEATHS

    @property
    def is_guilty(self) -> bool:
        """Whether the request is to fail."""
        deaths = self._unexplained()[self.peak] if self.deaths else []
        return self.is_stuck or (len(deaths) >= GUILTY_DEATHS and _alone(deaths) >= ALONE_DEATHS)

    @property
    def is_stuck(self) -> bool:
        """Whether it is to fail although the deaths may have other causes."""
        return self.lives >= MOST_LIVES

    @property
    def is_journal_suspect(self) -> bool:
        """Whether its journal is to be dropped: it may be what its workers died of.

        So before the death that would make the request guilty, and after as many at one earlier
        point.
        """
        point = self.deaths[-1][0] if self.deaths else 0
        deaths, rest = self._unexplained()[point], int(point == self.peak)
        return len(deaths) >= GUILTY_DEATHS - rest and _alone(deaths) >= ALONE_DEATHS - rest

    @property
    def weight(self) -> tuple[int, int]:
        """The most deaths at one point: without others in the worker, and in all."""
        points = self._unexplained().values() if self.deaths else ()
        return max(((_alone(deaths), len(deaths)) for deaths in points), default=(0, 0))

    def explain(self) -> None:
        """The request is guilty: its deaths count against no other request any more."""
        for _, death in self.deaths:
            death.is_explained = True

    def _unexplained(self) -> dict[int, list[Death]]:
        """Unexplained deaths by their points."""
        points = defaultdict[int, list[Death]](list)
        for position, death in self.deaths:
            if not death.is_explained:
                points[position].append(death)
        return points


def _alone(deaths: list[Death]) -> int:
    return sum(death.was_alone for death in deaths)
