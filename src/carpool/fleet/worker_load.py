"""The load of one worker in the router's view: bound requests, and the seconds of their steps.

No processes, no clock. The simulator and the server use the same objects.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from carpool.schedule.views import QueuedRequest
from carpool.schedule.width import best_width

UNKNOWN: "StepTable" = (1.0, 1.5)
"""For a kind that no worker has run: a second a step, and a second request adds half of that."""

StepTable = tuple[float, ...]
"""Seconds of a denoising step shared by n requests, in entry n - 1."""


class RoutedRequest(QueuedRequest, frozen=True):
    """The router's view of one request: as a policy's, with the size of its work."""

    kind: Hashable = None  # requests of one kind may share denoising forwards
    steps: int = 1  # denoising steps; tokens of a text


@lru_cache(4096)
def paying_width(table: StepTable, backlog: int, min_gain: float) -> int:
    """The number of requests that a worker runs together, by the engine's width rule.

    Args:
        backlog: requests in flight per worker.
        min_gain: see `best_width`.
    """
    return best_width(enumerate(table, 1), backlog, min_gain)


def step_s(table: StepTable, together: int) -> float:
    """Seconds of a round in which each of `together` requests makes one step, in as many forwards
    as needed."""
    width = len(table)
    if together <= width:
        return table[together - 1]
    return together // width * table[-1] + (table[together % width - 1] if together % width else 0)


@dataclass(slots=True)
class Bound:
    """A request bound to a worker, with its remaining steps."""

    work: RoutedRequest
    steps_left: float
    table: StepTable

    @property
    def left_s(self) -> float:
        """Remaining seconds, alone on the worker."""
        return self.steps_left * self.table[0]


@dataclass(slots=True)
class WorkerLoad:
    """The router's view of one worker."""

    id: int
    tables: Mapping[Hashable, StepTable] = field(default_factory=dict)  # learned, by kind
    max_requests: int = 32  # max running requests
    is_open: bool = True  # takes requests
    shares_sweeps: bool = False  # streamed weights: requests of all kinds share every step
    told_s: float = 0.0  # time of its last report
    bound_at: int = 0  # number of the latest binding to it
    bound: dict[int, Bound] = field(default_factory=dict)  # keyed by `RoutedRequest.request`
    load_s: float = 0.0  # predicted end of an average new request; see `weigh`
    kinds: frozenset[Hashable] = frozenset()  # kinds of the bound requests

    @property
    def left_s(self) -> float:
        """Predicted work of all bound requests, one after another."""
        return sum([bound.steps_left * bound.table[0] for bound in self.bound.values()])

    def weigh(self) -> None:
        """Recompute `load_s` and `kinds` after a change."""
        steps_s = [table[0] for table in self.tables.values()]
        self.load_s = self.left_s + (sum(steps_s) / len(steps_s) if steps_s else 0.0)
        self.kinds = frozenset([bound.work.kind for bound in self.bound.values()])


def sweep_s(tables: Sequence[StepTable]) -> float:
    """Seconds of a step shared by requests of any kinds: of copying weights, or of all compute.

    A request's share of the compute is the per-request part of the last entry of its table, or less
    if the copies hide it.
    """
    copies_s = max([table[0] for table in tables])
    return max(copies_s, sum([table[-1] / len(table) for table in tables]))


def _sweeps_s(work: RoutedRequest, worker: WorkerLoad, table: StepTable, worked_s: float) -> float:
    """`extra_s` for a worker where requests of all kinds share every step.

    Args:
        worked_s: seconds since the worker's last report.
    """
    bound = worker.bound.values()
    tables = [entry.table for entry in bound]
    without_s, together_s = sweep_s(tables), sweep_s([*tables, table])
    past_steps = worked_s / without_s if worked_s else 0.0
    lefts = [max(0.0, entry.steps_left - past_steps) for entry in bound]
    shared_steps = sum([min(steps, work.steps) for steps in lefts])
    return work.steps * together_s + shared_steps * (together_s - without_s)


def extra_s(work: RoutedRequest, worker: WorkerLoad, table: StepTable, now_s: float = 0.0) -> float:
    """The increase of the total completion time of all requests if the worker gets this one.

    The request may share forwards with requests of its kind: its own steps take as long as a
    forward of all of them, and each other one is slowed down while both run. Or it runs apart,
    which is better if rows gain little: of two requests that run apart the shorter one goes first,
    and the longer one waits for it; so do requests of different kinds. The worker's progress since
    its last report is extrapolated: it worked all that time, on the oldest requests first.

    Args:
        table: the worker's seconds a step of this kind.
        now_s: on the clock of `told_s`.

    Source: MinIncrease, Megow, Uetz and Vredeveld, Models and Algorithms for Stochastic Online
    Scheduling, Mathematics of Operations Research 31(3), 2006.
    """
    alone_s = work.steps * table[0]
    bound = worker.bound.values()
    if not bound:
        return alone_s
    worked_s = max(0.0, now_s - worker.told_s)
    if worker.shares_sweeps:
        return _sweeps_s(work, worker, table, worked_s)
    apart_s, peers = 0.0, []
    for entry in bound:
        left_s, steps_left = entry.steps_left * entry.table[0], entry.steps_left
        if worked_s:
            done_s = left_s if left_s < worked_s else worked_s
            worked_s, left_s = worked_s - done_s, left_s - done_s
            steps_left = left_s / entry.table[0]
        if entry.work.kind == work.kind:
            peers.append(steps_left)
        else:
            apart_s += left_s if left_s < alone_s else alone_s
    if not peers:
        return alone_s + apart_s
    shared_steps = sum([steps if steps < work.steps else work.steps for steps in peers])
    together_s = step_s(table, len(peers) + 1)
    slower_s = together_s - step_s(table, len(peers))
    fused_s = work.steps * together_s + shared_steps * slower_s
    solo_s = alone_s + shared_steps * table[0]
    return min(fused_s, solo_s) + apart_s
