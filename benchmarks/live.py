"""Carpool's modes, LitServe, and FastAPI with a lock, live on this machine: two tables.

usage: make bench     (or: OMP_NUM_THREADS=1 python -m benchmarks.live [--quick] [--append-to FILE])

Each party is a separate server with the embedded model, alone on the machine during its
measurement, under load from the client of `carpool bench`. The parties take turns, in a new order
each round; in a round all get the same requests at the same times. The second table compares
simulated with measured latencies of Carpool's runs.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import agreement
from benchmarks.live_rounds import (
    SLO_SCALE,
    LivePoint,
    LiveSettings,
    Reference,
    reference,
    turns,
    visit,
)
from benchmarks.parties import LOCKED, PARTIES
from benchmarks.process import machine
from carpool.errors import CarpoolError

COLUMNS = (
    "load | server | p50 (s) | p99 (s) | mean (s) | throughput (req/s) | goodput (req/s) "
    "| right | as plain diffusers | against the lock"
)
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.live"


def pooled(points: Sequence[LivePoint]) -> agreement.Latencies | None:
    """Latencies of all answers of several rounds; None: no answers."""
    outcomes = (outcome for point in points for outcome in point.outcomes)
    seconds = [outcome.latency_s for outcome in outcomes if outcome.failure is None]
    return agreement.Latencies.of(seconds) if seconds else None


def table(points: Sequence[LivePoint]) -> str:
    """A Markdown table with a line for each load and party.

    Latencies are over all rounds; throughput and goodput are medians of the rounds. The last
    column is the mean latency of `LOCKED` in the same round, divided by the party's.
    """
    lines = [f"| {COLUMNS} |", "|" + " --- |" * (COLUMNS.count("|") + 1)]
    for load, party in dict.fromkeys((point.load, point.party) for point in points):
        points_here = [point for point in points if (point.load, point.party) == (load, party)]
        locked = {p.round: p for p in points if (p.load, p.party) == (load, LOCKED)}
        ratios = [
            there.summary.latency_mean / here.summary.latency_mean
            for here in points_here
            if (there := locked.get(here.round)) is not None
            and there.summary.latency_mean
            and here.summary.latency_mean
        ]
        latencies = pooled(points_here)
        cells = [
            f"{load:g}",
            party.name,
            *(
                ("n/a",) * 3
                if latencies is None
                else (f"{s:.2f}" for s in (latencies.p50_s, latencies.p99_s, latencies.mean_s))
            ),
            f"{statistics.median(point.summary.throughput_qps for point in points_here):.2f}",
            f"{statistics.median(point.summary.goodput_qps or 0.0 for point in points_here):.2f}",
            f"{statistics.fmean(point.right for point in points_here):.1%}",
            f"{statistics.fmean(point.alike for point in points_here):.1%}",
            f"{statistics.median(ratios):.2f}x" if ratios else "n/a",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def agreements(points: Sequence[LivePoint]) -> list[agreement.Agreement]:
    """Simulate every run of Carpool without failures."""
    return [
        agreement.agreement(
            p.party.mode,
            p.load,
            p.arrivals,
            [outcome.latency_s for outcome in p.outcomes],
            p.before,
            p.after,
        )
        for p in points
        if p.party.mode and not p.summary.failed_requests
    ]


def page(tested: LiveSettings, baseline: Reference, points: Sequence[LivePoint]) -> str:
    """Both tables, with explanations."""
    failed = sum(point.summary.failed_requests for point in points)
    settings = (
        f"{', '.join(map(str, tested.steps))} steps, guidance "
        f"{', '.join(f'{g:g}' for g in tested.guidance)}"
    )
    plain_right = statistics.fmean(point.plain_right for point in points)
    return f"""## Live: modes, LitServe, FastAPI with a lock

Made by `{COMMAND}` (rounds: {tested.rounds}; requests per round at load \
{max(tested.loads):g}: {tested.count}, fewer at other loads for equal durations).
Machine: {machine()}; every server with one thread for torch.

The embedded model with held-out prompts; {settings}, mixed. Load 1 is {baseline.capacity_qps:.2f}
requests a second, the rate of the server with a lock for one client that waits for each answer.
Arrivals are Poisson; latency counts from the arrival. Latencies are of all rounds together;
throughput and goodput (answers within {SLO_SCALE:g} times the time alone with the lock) are
medians of rounds. *Right*: pictures that the judge accepts ({plain_right:.1%} of plain diffusers'
with the same seeds); *as plain diffusers*: equal pictures; *against the lock*: factor by which
the mean latency is lower in the same round. Failed requests: {failed}.

{table(points)}

## Measured and simulated

The simulator repeats these runs with each server's learned cost table, the seconds of its own code
per call, and the speed of the run's forwards relative to the table (last column). Medians of
rounds. *Measured/simulated* is the ratio of the means, bold beyond {agreement.GOAL:.0%};
p50, p99 and *by the table alone* (the mean, without the two corrections) are such ratios, too.

{agreement.table(agreements(points))}
"""


async def measure(settings: LiveSettings) -> tuple[Reference, list[LivePoint]]:
    """Measure all rounds.

    Raises:
        CarpoolError: single requests fail.
        RuntimeError: a server does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        baseline = await reference(settings, cache)
        points: list[LivePoint] = []
        for number, party in turns(settings.parties, settings.rounds):
            print(f"round {number} of {settings.rounds}: {party.name}", file=sys.stderr)
            points += await visit(party, number, settings, baseline, cache)
    order = {party: place for place, party in enumerate(PARTIES)}
    points.sort(key=lambda point: (point.load, order[point.party], point.round))
    return baseline, points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of few requests: a try")
    parser.add_argument("--append-to", type=Path, help="also append the page to this file")
    options = parser.parse_args()
    settings = LiveSettings(PARTIES)
    if options.quick:
        settings = replace(settings, rounds=1, count=12, loads=(0.5, 1.5), steps=(4, 8))
    try:
        text = page(settings, *asyncio.run(measure(settings)))
    except (CarpoolError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    if options.append_to:
        with options.append_to.open("a") as file:
            file.write("\n" + text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
