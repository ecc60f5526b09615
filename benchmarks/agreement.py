"""Compare measured with simulated latency: replay the arrivals of a run in the simulator.

The simulator gets the server's learned cost table and two numbers of the run: the seconds per call
that the loop and the pipelines' own code took in addition to forwards, and the ratio of measured
forwards to the table (the table has medians of recent forwards, and the speed of shared machines
changes). HTTP, PNG and the client are not simulated.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from carpool.config import BatchingMode
from carpool.schedule.cost import Costs
from carpool.schedule.views import CallKind
from carpool_lab.simulate.report import Latency
from carpool_lab.simulate.scenario import Model, play
from carpool_lab.tables import Table, learned
from carpool_lab.workload import Arrival
from proof.page import table as markdown

GOAL = 0.15  # relative error of the mean
COLUMNS = (
    "mode", "load", "mean measured (s)", "simulated (s)", "measured/simulated", "p99",
    "forwards/table",
)  # fmt: skip
ABOUT = f"""\
The Poisson loads, played by the simulator with each server's learned cost table, the seconds of its
own code for each call, and the speed of the run's forwards relative to the table (last column).
Medians of the rounds. *Measured/simulated* is of the mean, bold beyond {GOAL:.0%}; p99 is such a
ratio, too."""
_MODEL_STEPS = 28  # default of requests; ours all set it


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a server between two snapshots of its statistics."""

    forward_s: float  # seconds in modules
    own_s: float  # seconds in the loop and the pipelines' code
    forwards: Mapping[tuple[str, int], int]  # counts by name and rows

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> "Work":
        forward_s = after["forward_s"] - before["forward_s"]
        turn_s = after["turn_s"] - before["turn_s"]
        then, now = _tally(before), _tally(after)
        ran = {key: count - then.get(key, 0) for key, count in now.items()}
        return cls(forward_s, turn_s - forward_s, ran)

    def predicted_s(self, costs: Costs) -> float:
        """Predict the seconds of its forwards from a cost table."""
        kinds: dict[str, CallKind] = {kind.name: kind for kind, _ in costs}
        return sum(
            count * costs.seconds(kinds[name], rows)
            for (name, rows), count in self.forwards.items()
        )


def _tally(stats: Mapping[str, Any]) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for entry in stats["forwards"]:
        key = f"{entry['component']}.{entry['method']}", entry["rows"]
        counts[key] = counts.get(key, 0) + entry["count"]
    return counts


@dataclass(frozen=True, slots=True)
class Agreement:
    """One run, measured and simulated."""

    mode: BatchingMode
    load: float
    measured: Latency
    simulated: Latency
    drift: float  # seconds of forwards, relative to the table


def agreement(
    mode: BatchingMode,
    load: float,
    arrivals: Sequence[Arrival],
    latencies_s: Sequence[float],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> Agreement:
    """Simulate a run.

    Args:
        latencies_s: measured latencies, in any order.
        before: the server's statistics at the start of the run.
        after: its statistics at the end, with the cost table.
    """
    costs = Costs.from_json(after["costs"])
    work = Work.between(before, after)
    [table] = learned(costs, steps=_MODEL_STEPS).values()
    drift = work.forward_s / work.predicted_s(costs)
    model = Model([_scaled(table, drift)])
    calls = sum(stage.count for arrival in arrivals for stage in model.stages(arrival.body))
    model.own_s = work.own_s / calls
    simulated = Latency.of([ride.latency_s for ride in play(model, arrivals, mode).requests])
    return Agreement(mode, load, Latency.of(latencies_s), simulated, drift)


def _scaled(table: Table, by: float) -> Table:
    return replace(
        table,
        denoise_s={rows: seconds * by for rows, seconds in table.denoise_s.items()},
        encode_s=table.encode_s * by,
        decode_s=table.decode_s * by,
    )


def table(agreements: Sequence[Agreement]) -> str:
    """A Markdown table: medians over rounds, with ratios taken within a round."""
    rows = []
    for mode, load in dict.fromkeys((cell.mode, cell.load) for cell in agreements):
        rounds = [cell for cell in agreements if (cell.mode, cell.load) == (mode, load)]
        mean = statistics.median(cell.measured.mean_s / cell.simulated.mean_s for cell in rounds)
        p99 = statistics.median(cell.measured.p99_s / cell.simulated.p99_s for cell in rounds)
        rows.append(
            [
                mode,
                f"{load:g}",
                f"{statistics.median(cell.measured.mean_s for cell in rounds):.3f}",
                f"{statistics.median(cell.simulated.mean_s for cell in rounds):.3f}",
                f"{mean:.2f}" if abs(mean - 1) <= GOAL else f"**{mean:.2f}**",
                f"{p99:.2f}",
                f"{statistics.median(cell.drift for cell in rounds):.2f}",
            ]
        )
    return markdown(COLUMNS, rows)
