"""The load of one worker, as the router knows it: bound requests, and the times of their steps.

Nothing here knows processes or clocks. The simulator and the server use the same objects.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from carpool.schedule.width import best_width

UNKNOWN: "StepTable" = (1.0, 1.5)
"""Of a kind that no worker has run: a second a step, and half of a row is free."""

StepTable = tuple[float, ...]
"""Seconds of a denoising step by the requests that share it: entry n - 1 is for n of them."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The router's view of one request."""

    request: int  # place in the line of all requests
    kind: Hashable = None  # requests of one kind may share denoising forwards
    steps: int = 1  # denoising steps
    arrived_s: float = 0.0  # the front's clock
    deadline_s: float = inf  # on the same clock
    priority: int = 0  # -10 to 10; higher goes first
    tenant: str = ""
    user: str = ""  # of the tenant


@lru_cache(4096)
def paying_width(table: StepTable, backlog: int, min_gain: float) -> int:
    """The number of requests that a worker runs together, by the rule of the engine.

    Args:
        backlog: requests in flight, for each worker.
        min_gain: see `best_width`.
    """
    return best_width(enumerate(table, 1), backlog, min_gain)


def step_s(table: StepTable, together: int) -> float:
    """Seconds of a round in which so many requests make a step each, in as many forwards as that
    takes."""
    width = len(table)
    if together <= width:
        return table[together - 1]
    return together // width * table[-1] + (table[together % width - 1] if together % width else 0)


@dataclass(slots=True)
class Bound:
    """A request that was bound to a worker, with the steps that it has left."""

    work: RoutedRequest
    steps_left: float
    table: StepTable

    @property
    def left_s(self) -> float:
        """Alone on the worker."""
        return self.steps_left * self.table[0]


@dataclass(slots=True)
class WorkerLoad:
    """One worker, as the router sees it."""

    id: int
    tables: Mapping[Hashable, StepTable] = field(default_factory=dict)  # by kind; learned
    max_requests: int = 32  # requests that it runs at the same time
    is_open: bool = True  # takes requests
    shares_sweeps: bool = False  # its weights are streamed: requests of all kinds share every step
    told_s: float = 0.0  # when it told what its requests have left
    bound_at: int = 0  # when a request was bound to it last, in bindings
    bound: dict[int, Bound] = field(default_factory=dict)  # by `RoutedRequest.request`
    load_s: float = 0.0  # when an average request would end there; see `weigh`
    kinds: frozenset[Hashable] = frozenset()  # of the bound requests

    @property
    def left_s(self) -> float:
        """Predicted work of all that is bound to it, one request after the other."""
        return sum([bound.steps_left * bound.table[0] for bound in self.bound.values()])

    def weigh(self) -> None:
        """Renew `load_s` and `kinds` after a change."""
        steps_s = [table[0] for table in self.tables.values()]
        self.load_s = self.left_s + (sum(steps_s) / len(steps_s) if steps_s else 0.0)
        self.kinds = frozenset([bound.work.kind for bound in self.bound.values()])


def sweep_s(tables: Sequence[StepTable]) -> float:
    """Seconds of a step that requests of any kinds share: of copying weights, or of computing all.

    What one of them adds to computing is the last entry's part of its table, or, where that is
    hidden by the copies, at most that.
    """
    copies_s = max([table[0] for table in tables])
    return max(copies_s, sum([table[-1] / len(table) for table in tables]))


def _in_sweeps_s(
    work: RoutedRequest, worker: WorkerLoad, table: StepTable, worked_s: float
) -> float:
    """`extra_s` where requests of all kinds share every step.

    Args:
        worked_s: since the worker told what they have left.
    """
    bound = worker.bound.values()
    tables = [entry.table for entry in bound]
    without_s, together_s = sweep_s(tables), sweep_s([*tables, table])
    past_steps = worked_s / without_s if worked_s else 0.0
    shared_steps = sum(
        [min(max(0.0, entry.steps_left - past_steps), work.steps) for entry in bound]
    )
    return work.steps * together_s + shared_steps * (together_s - without_s)


def extra_s(work: RoutedRequest, worker: WorkerLoad, table: StepTable, now_s: float = 0.0) -> float:
    """Seconds by which the ends of all requests move, in sum, if the worker gets this one.

    The request shares forwards with those of its kind: its own steps take as long as a forward of
    them all, and each of the others is slowed down for as long as both run. Or it runs apart, which
    is better where rows gain little: of two requests that run apart the shorter goes first, so the
    longer waits for it. That is also so between kinds. What the worker did since it last told is
    reckoned: it worked all that time, first at what it has had longest.

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
        return _in_sweeps_s(work, worker, table, worked_s)
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
