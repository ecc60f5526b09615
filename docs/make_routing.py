"""Write docs/routing.md and docs/routing.csv: every router in every scene, and the promise.

usage: make simulate-routing    (a quarter of an hour; exits with 1 where the promise is broken)
"""

import argparse
import csv
import math
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from itertools import groupby
from pathlib import Path

import routing_promise as routing

SURE = 0.5  # fraction of a limit; below it 400 requests are enough
PAGE, DATA = (Path(__file__).with_name(f"routing.{form}") for form in ("md", "csv"))
HEAD = """# Routers, compared

Written by `make simulate-routing`. The server's router (`extra-seconds`) is compared with the best
of least-work, least-requests, round-robin and random on the same 400 requests, or on 3 x 1,000
where the result is closer than half way to a limit. The ratios of each scene are in
[routing.csv](routing.csv).

The promise: mean latency at most {mean} times and p99 at most {p99} times the best of the others.
It is kept in {kept} of {count} scenes.

| requests | scenes | mean: average, worst | p99: average, worst | p99 below random | kept |
| --- | ---: | ---: | ---: | ---: | ---: |
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A scene, and the server's router as a ratio to the best of the others."""

    group: str  # scenes that are a row of the page
    scene: str
    requests: str
    mean: float
    p99: float
    below_random: float
    is_kept: bool


def compare(scene: routing.Scene) -> Comparison:
    """Play a scene with every router."""
    latencies = routing.compare_routers(scene, seeds=(0,), count=400)
    mean, p99 = routing.ratios(latencies)
    if is_close := mean > 1 + SURE * (routing.MOST_MEAN - 1) or p99 > 1 + SURE * (
        routing.MOST_P99 - 1
    ):
        latencies = routing.compare_routers(scene, seeds=(0, 1, 2), count=1000)
        mean, p99 = routing.ratios(latencies)
    return Comparison(
        _group(scene),
        str(scene),
        "3 x 1,000" if is_close else "400",
        round(mean, 3),
        round(p99, 3),
        round(routing.below_random(latencies), 2),
        mean <= routing.MOST_MEAN and p99 <= routing.MOST_P99,
    )


def _group(scene: routing.Scene) -> str:
    if scene.slow:
        return f"mixed steps, {scene.workers} workers, one in ten slow"
    if scene.lifetime_s < math.inf:
        return f"mixed steps, {scene.workers} workers that die"
    if scene.table == "mixed-sizes":
        return f"sizes from 512 to 1536 px, {scene.workers} workers"
    names = {"uniform": "equal requests", "steps": "mixed steps", "sizes": "mixed sizes"}
    return f"{names.get(scene.mix, 'several tenants')}, {scene.workers} workers"


def page(comparisons: Sequence[Comparison]) -> str:
    """The page, with a row for each group."""
    kept = sum(row.is_kept for row in comparisons)
    limits = {"mean": routing.MOST_MEAN, "p99": routing.MOST_P99}
    text = HEAD.format(**limits, kept=kept, count=len(comparisons))
    for name, group in groupby(sorted(comparisons, key=lambda row: row.group), lambda r: r.group):
        rows = list(group)
        means, p99s = [row.mean for row in rows], [row.p99 for row in rows]
        text += (
            f"| {name} | {len(rows)} | {statistics.fmean(means):.3f}, {max(means):.3f} "
            f"| {statistics.fmean(p99s):.3f}, {max(p99s):.3f} "
            f"| {statistics.fmean(row.below_random for row in rows):.0%} "
            f"| {sum(row.is_kept for row in rows)} |\n"
        )
    return text


def main() -> int:
    """Returns 1 if the promise is broken in any scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    comparisons = []
    with ProcessPoolExecutor(parser.parse_args().processes) as pool:
        for comparison in pool.map(compare, routing.all_scenes()):
            comparisons.append(comparison)
            sys.stdout.write(f"{comparison}\n")
            sys.stdout.flush()
    with DATA.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(column.name for column in fields(Comparison))
        rows.writerows(map(astuple, comparisons))
    PAGE.write_text(page(comparisons), encoding="utf-8")
    return 0 if all(comparison.is_kept for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
