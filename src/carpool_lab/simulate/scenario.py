"""Scenarios of simulations: a cost table, a mix, arrivals, a mode, workers.

Requests are the plain dicts of `workload.py`, so the same mixes and traces drive the simulator and
the load client. Their fields here: `size`, `num_inference_steps`, `guidance_scale` and other values
that separate batches of `dynamic` and `request`, `priority`, `user` (the tenant) and `deadline_s`.
A request is one row of each of its forwards.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf
from typing import Any

from carpool.config import BatchingMode
from carpool.errors import InvalidValue
from carpool.fleet.router import Router
from carpool.schedule.batch_modes import Dynamic, Off, Waves
from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.policy import Policy
from carpool.schedule.views import QueuedRequest
from carpool_lab.simulate.fleet import Change, simulate
from carpool_lab.simulate.machine import WIDTHS, Machine, wrong
from carpool_lab.simulate.report import Numbers, Point, mean, numbers
from carpool_lab.simulate.simulator import Result, SimulatedRequest, Stage, Worker
from carpool_lab.tables import MAX_ROWS, Table
from carpool_lab.workload import WORDS, Arrival, Mix, Setting, bursts, generators, plan

MODES: dict[BatchingMode, Callable[[Costs], Policy]] = {
    "off": lambda costs: Off(),
    "dynamic": lambda costs: Dynamic(max_size=8, delay_s=0.005),
    "request": lambda costs: Waves(max_num_seqs=8, wait_s=0.020),
    "continuous": lambda costs: Continuous(costs),
}
"""Makers of policies; batching policies get typical sizes and waits."""

SLOW_WORKER_FACTOR = 4.0  # duration of forwards on a slow worker, relative
AWAY_S = 20.0  # from a worker's death until its successor is ready

MIXES = ("uniform", "steps", "sizes", "tenants")


def mix(name: str, tables: Sequence[Table]) -> Mix:
    """A built-in mix: `uniform`, `steps`, `sizes` or `tenants`.

    Args:
        tables: one for each size; all mixes except `sizes` use the first.

    Raises:
        InvalidValue: no such mix, or only one table for `sizes`.
    """
    match name:
        case "uniform":
            bodies: list[dict[str, Any]] = [{}]
        case "steps":
            bodies = [
                {"num_inference_steps": steps, "guidance_scale": guidance}
                for steps, guidance in product((8, 20, 50), (3.0, 4.0, 5.0))
            ]
        case "sizes" if len(tables) > 1:
            bodies = [{"size": table.size} for table in tables]
        case "tenants":
            return Mix([Setting({"priority": 5}, weight=1), Setting({"priority": 0}, weight=9)])
        case "sizes":
            raise InvalidValue(f"mix sizes: there is only one table of {tables[0].model}")
        case _:
            raise InvalidValue(f"mix {name!r}: must be of {', '.join(MIXES)}, or a file")
    return Mix([Setting(body) for body in bodies])


@dataclass(slots=True)
class Model:
    """A model's costs at its sizes, and the calls of its requests."""

    tables: Sequence[Table]  # the first is for requests without a size
    own_s: float = 0.0  # time per call besides forwards; see `Worker`
    costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        self.costs = Costs(
            {kind: curve for table in self.tables for kind, curve in table.costs().items()}
        )
        self.costs.streams = {n: s for table in self.tables for n, s in table.streams.items()}

    def stages(self, body: Mapping[str, Any]) -> tuple[Stage, ...]:
        """The calls of a request.

        Raises:
            InvalidValue: no table for its size.
        """
        table = self._table(body.get("size"))
        encode, denoise = table.kind("encode"), table.kind("denoise")
        decode = table.kind("decode")
        steps = body.get("num_inference_steps") or table.steps
        step_s = max(table.sweep_s, table.denoise_s[1])
        return (
            Stage(encode, "encode", encode.name, table.encode_s),  # all sizes share text encoders
            Stage(denoise, "denoise", denoise.detail, step_s, count=steps),
            Stage(decode, "decode", decode.detail, table.decode_s),
        )

    def _table(self, size: str | None) -> Table:
        if size is None:
            return self.tables[0]
        for table in self.tables:
            if size == table.size:
                return table
        names = ", ".join(table.name for table in self.tables)
        raise InvalidValue(f"size {size!r}: no cost table has it; there are {names}")

    def capacity_qps(self, mix: Mix) -> float:
        """Requests a second of a mix, with every denoising step at its fastest width."""
        work_s = weight = 0.0
        for setting in mix.settings:
            weight += setting.weight
            encode, denoise, decode = self.stages(setting.body)
            curve = self.costs.curve(denoise.kind)
            step_s = min(curve.seconds(n) / n for n in range(1, MAX_ROWS["denoise"] + 1))
            work_s += setting.weight * (encode.call_s + denoise.count * step_s + decode.call_s)
        return weight / work_s

    def requests(self, arrivals: Sequence[Arrival], labels: "Labels") -> Iterator[SimulatedRequest]:
        """The requests of a simulation, in order of arrival."""
        for number, arrival in enumerate(arrivals, 1):
            body = arrival.body
            stages = self.stages(body)
            solo_s = sum(stage.call_s * stage.count for stage in stages)
            settings = {name: value for name, value in body.items() if name not in WORDS}
            waiting = QueuedRequest(
                request=number,
                arrived_s=arrival.at_s,
                left_s=solo_s,
                whole_s=solo_s,
                deadline_s=arrival.at_s + body.get("deadline_s", inf),
                priority=body.get("priority", 0),
                tenant=body.get("user", ""),
                signature=settings,
                wave=tuple(sorted(settings.items())),
            )
            yield SimulatedRequest(waiting, stages, labels.of(body))


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of the classes of a mix: the fields that differ, except for guidance."""

    names: Sequence[str] = ()

    @classmethod
    def among(cls, arrivals: Sequence[Arrival]) -> "Labels":
        """Labels of the fields that differ among these requests."""
        candidates = ("size", "num_inference_steps", "priority", "user", "deadline_s")
        return cls([n for n in candidates if len({a.body.get(n) for a in arrivals}) > 1])

    def of(self, body: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={body.get(name, 'default')}" for name in self.names) or "all"


def play(
    model: Model,
    arrivals: Sequence[Arrival],
    mode: BatchingMode,
    *,
    workers: int = 1,
    router: Router | None = None,
    clients: int | None = None,
    learned: int | None = None,
    slow: float = 0.0,
    lifetime_s: float = inf,
    moves: bool = False,
) -> Result:
    """Simulate one mode. For other arguments see `simulate`.

    Args:
        learned: a seed: forwards are disturbed, and costs are learned from them, with an even seed
            from nothing, with an odd one from a table with wrong widths. None: costs are known.
        slow: fraction of workers whose forwards take `SLOW_WORKER_FACTOR` times as long.
        moves: running requests may move between workers.
        lifetime_s: mean lifetime of a worker; its successor is ready `AWAY_S` later.
    """
    costs = [model.costs] * workers
    if slow:
        every = round(1 / slow)
        costs = [slower(model.costs) if n % every == 0 else model.costs for n in range(workers)]
    devices = [_worker(model, device_costs, mode, learned) for device_costs in costs]
    changes: list[Change] = []
    if lifetime_s < inf:
        rng = random.Random(workers)
        for number, device_costs in enumerate(costs):
            at_s, last_s = rng.expovariate(1 / lifetime_s), arrivals[-1].at_s
            while at_s < last_s:
                changes.append(Change(at_s, number))
                at_s += AWAY_S
                make = partial(_worker, model, device_costs, mode, learned)
                changes.append(Change(at_s, number, make))
                at_s += rng.expovariate(1 / lifetime_s)
        changes.sort(key=lambda change: (change.at_s, change.worker))
    requests = model.requests(arrivals, Labels.among(arrivals))
    return simulate(requests, devices, router, clients=clients, changes=changes, moves=moves)


def slower(costs: Costs) -> Costs:
    """The costs of a device that is slower by `SLOW_WORKER_FACTOR`."""
    return Costs(
        {
            kind: Curve({rows: SLOW_WORKER_FACTOR * curve.seconds(rows) for rows in WIDTHS})
            for kind, curve in costs
        }
    )


def _worker(model: Model, costs: Costs, mode: BatchingMode, learned: int | None) -> Worker:
    if learned is None:
        return Worker(MODES[mode](costs), costs, MAX_ROWS, model.own_s)
    beliefs = wrong(costs, learned) if learned % 2 else Costs()
    beliefs.streams = costs.streams  # times of copies are measured separately
    policy, machine = MODES[mode](beliefs), Machine(learned)
    is_learning = mode == "continuous"
    return Worker(policy, costs, MAX_ROWS, model.own_s, machine, beliefs if is_learning else None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Settings of a comparison of modes: loads, seeds, requests."""

    mix_name: str
    mix: Mix
    modes: Sequence[BatchingMode]
    loads: Sequence[float]  # fractions of the capacity
    seeds: Sequence[int] = (0,)
    count: int = 1000  # requests for each seed
    burst: int = 1
    slo_scale: float = 5.0
    workers: int = 1
    is_learned: bool = False  # costs are learned; see `play`


def compare(model: Model, comparison: Comparison) -> Iterator[Point]:
    """Simulate every mode at every load, with equal requests; returns means over seeds."""
    capacity_qps = comparison.workers * model.capacity_qps(comparison.mix)
    for load in comparison.loads:
        of_seeds: list[dict[BatchingMode, Numbers]] = []
        for seed in comparison.seeds:
            when, rng = generators(seed)
            times = bursts(load * capacity_qps, when, size=comparison.burst)
            arrivals = plan(times, comparison.mix, rng, count=comparison.count)
            of_seeds.append(
                {
                    mode: _numbers(model, comparison, arrivals, mode, seed)
                    for mode in comparison.modes
                }
            )
        for mode in comparison.modes:
            result = mean([of_seed[mode] for of_seed in of_seeds])
            yield Point(
                model.tables[0].name, comparison.mix_name, load, mode, result, len(of_seeds)
            )


def _numbers(
    model: Model, comparison: Comparison, arrivals: Sequence[Arrival], mode: BatchingMode, seed: int
) -> Numbers:
    learned = seed if comparison.is_learned else None
    result = play(model, arrivals, mode, workers=comparison.workers, learned=learned)
    return numbers(result, comparison.slo_scale)
