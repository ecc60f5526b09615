"""An index of workers by their load: finds the few that the router compares for one request."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from itertools import islice

from carpool.fleet.worker_load import WorkerLoad

LOOKED_AT = 8  # workers


class WorkerIndex:
    """Open workers by when an average request would end there: all, and those of each kind."""

    def __init__(self) -> None:
        self._ranked: list[tuple[float, int]] = []
        self._kinds: dict[Hashable, list[tuple[float, int]]] = {}
        self._entries: dict[int, tuple[float, frozenset[Hashable]]] = {}
        self._workers: dict[int, WorkerLoad] = {}

    def __len__(self) -> int:
        return len(self._ranked)

    def key(self, worker: WorkerLoad) -> float:
        return self._entries[worker.id][0]

    def put(self, worker: WorkerLoad) -> None:
        """A worker has changed."""
        self.remove(worker)
        if not worker.is_open:
            return
        tables = worker.tables.values()
        speed_s = sum([table[0] for table in tables]) / len(tables) if tables else 0.0
        key = worker.left_s + speed_s
        kinds = frozenset([bound.work.kind for bound in worker.bound.values()])
        self._entries[worker.id], self._workers[worker.id] = (key, kinds), worker
        insort(self._ranked, (key, worker.id))
        for kind in kinds:
            insort(self._kinds.setdefault(kind, []), (key, worker.id))

    def remove(self, worker: WorkerLoad) -> None:
        entry = self._entries.pop(worker.id, None)
        if entry is None:
            return
        key, kinds = entry
        del self._workers[worker.id]
        for ranks in (self._ranked, *(self._kinds[kind] for kind in kinds)):
            del ranks[bisect_left(ranks, (key, worker.id))]
        for kind in kinds:
            if not self._kinds[kind]:
                del self._kinds[kind]

    def look(self, kind: Hashable) -> Iterable[WorkerLoad]:
        """The workers that a choice looks at, each once."""
        if len(self._ranked) <= 2 * LOOKED_AT:
            numbers = [number for _, number in self._ranked]
        else:
            first = [number for _, number in islice(self._ranked, LOOKED_AT)]
            fused = [number for _, number in islice(self._kinds.get(kind, ()), LOOKED_AT)]
            numbers = list(dict.fromkeys([*first, *fused]))
        return [self._workers[number] for number in numbers]
