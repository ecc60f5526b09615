"""Simulate all modes on all built-in tables and mixes: docs/scheduling.csv, two plots, the page.

usage: make simulate    (exits with 1 and names the points if the promise is broken)

`--page` simulates nothing: it writes the page from the data file.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path
from typing import get_args

import click
from scheduling_promise import GOODPUT_LOAD, LEAST_GOODPUT, Verdict, limits, verdicts

from carpool.config import BatchingMode
from carpool_lab import plot
from carpool_lab.simulate.report import Point, plotted
from carpool_lab.simulate.scenario import MIXES, Comparison, Model, compare, mix
from carpool_lab.tables import TABLES, siblings

PAGE = Path(__file__).parent / "scheduling.md"
DATA = PAGE.with_suffix(".csv")
LOADS = (0.6, 0.9, 2.0)
SEEDS = range(2)
MORE_SEEDS = range(10)  # of points that miss a limit with `SEEDS`
COUNT = 300  # requests of a seed
FUSING_PAYS = ("flux-512-streamed", "qwen-512-streamed", "sana-512")
PLOTTED_MIXES = ("uniform", "steps")
DRAWN_TABLES = ("flux-512", "qwen-512", "sana-512", "qwen-512-streamed")
DEVICES: Mapping[str, Callable[[str], bool]] = {
    "H200, weights resident": lambda table: "streamed" not in table,
    "24 GB card, weights streamed": lambda table: "streamed" in table,
}
COLUMNS = ("table", "mix", "load", "costs", "mean", "p99", "goodput", "seeds")

INTRODUCTION = """\
# Scheduling

`make simulate` writes this page. It runs the server's own scheduling modes on a simulated device,
whose forwards take the seconds of a cost table and where nothing else takes time. The tables, most
of them estimates, are in `src/carpool_lab/tables.py`; all points are in
[scheduling.csv](scheduling.csv).

| mode | rule |
| --- | --- |
| `off` | one request after the other |
| `dynamic` | batches of 8 at admission, equal but for prompt and seed, 5 ms of delay |
| `request` | batches of 8 at admission, equal neighbours in the queue, 20 ms of delay |
| `continuous` | any calls share any forward; the width is chosen at every forward |

- **Mixes**: `uniform` has the model's usual number of steps; `steps` mixes 8, 20 and 50 steps with
  three guidance values; `sizes` mixes the model's sizes; in `tenants` every tenth request has
  priority 5.
- **Load** 1 is the capacity of the device at the fastest width, at most 8. The loads are {loads}.
- **Arrivals** are random (Poisson), {count} requests for each of {seeds} seeds. A point that misses
  a limit with these is simulated again with {more} seeds, and these count: with two, one point
  in twenty misses a limit by chance. *In time* means within 5 times the request's latency alone.
- **Known** costs: the policy has the cost table.
- **Learned** costs: the machine has neighbours. Forwards vary by 20 % (lognormal); one in a hundred
  takes ten times as long; phases of half a minute take twice as long; after ten minutes the device
  is 30 % slower. `continuous` starts without costs (even seeds) or with a table that is wrong by 4
  times at one width of each kind (odd seeds), and learns. The other modes need no costs.

Other points: `carpool simulate --table sana-512 --mix steps --compare
off,dynamic,request,continuous --loads 0.3,1.2`.

## The promise

Every figure is the latency of `continuous`, divided by that of the best other mode at the same
point (one simulated load), on the same requests; below 1 it is faster.
"""

PEERS = """\
## The peers' modes, to the letter

The peers are SGLang-Diffusion and vLLM-Omni. `dynamic` is SGLang-Diffusion's batching (0.5.23),
`request` is vLLM-Omni's at request level (0.30.0), with the same flags, files, batches and log
lines. As there, a request with n outputs is one request; in `continuous` and `off` its
outputs are scheduled one by one. The mode's own cap limits a batch, not `--max-batch-size`.
Differences:

| `dynamic` | SGLang-Diffusion | here | reason |
| --- | --- | --- | --- |
| start of `--batching-delay-ms` | when its loop reads the request, after the running forward | \
the request's arrival | waiting through a forward is waiting |
| look-ahead behind the first request | the whole queue | 1024 requests | a decision takes \
bounded time |
| families | Wan TI2V, LTX-2, HunyuanVideo and others are never batched | all are | calls that \
cannot share a forward run one by one, as there |
| adapters | one set for the server | part of a request; must be equal | requests choose them |
| absent parameter | the default of the model's parameter class | equal to the pipeline's \
default | the results are equal |
| outputs of one request | one message | outputs that come 0.1 s after the others are another \
batch | each can be cancelled and restarted alone |
| `Processed ...` and `Batch admission ...` in the log | always | with \
`--enable-batching-metrics` | the log is quiet by default |
| failing batch | all its requests fail | only the faulty request fails \
([reliability](reliability.md)) | |

| `request` | vLLM-Omni | here | reason |
| --- | --- | --- | --- |
| negative prompts | used if not empty and the request's `guidance_scale` is above 1 | the same;\
 an absent scale is the pipeline's default | absent means the default |
| arguments without a field in its key | may differ | must be equal | there the pipeline serves \
the first request's value, or none |
| prompts, pictures, latents | may be absent in some, unless the pipeline sets a condition key |\
 in all or none | with and without a picture are different calls |
| `None` and a default | differ | equal | the results are equal |
| pipelines without batch support | refused at the start with `--max-num-seqs` above 1 | \
accepted | any diffusers pipeline runs |

Rules and deploy files are read as by the peers; a rule may also have a `comment`. Refused here,
accepted there: NaN and infinite caps, a fraction of a batch, a duplicate key in an object.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="only the page, from the data file")
    parser.add_argument("--processes", type=int, help="default: number of cores")
    arguments = parser.parse_args()
    if not arguments.page:
        play_all(arguments.processes)
    points = read()
    PAGE.write_text(page(points), encoding="utf-8")
    for line in promise(points):
        click.echo(line)
    is_kept = all(
        limit.is_kept
        for is_learned in (False, True)
        for limit in limits(
            [p for p in points if p.is_learned == is_learned], is_learned=is_learned
        )
    )
    sys.exit(not is_kept or any(point.broken for point in points))


Study = tuple[str, str, bool]
"""Table, mix, and whether costs are learned."""


def studies() -> Iterator[Study]:
    """All tables with all mixes; a model's `sizes` only once, under its smallest table."""
    for table in TABLES.values():
        for name in MIXES:
            if name != "sizes" or (len(siblings(table)) > 1 and table.side_px == 512):
                yield from ((table.name, name, is_learned) for is_learned in (False, True))


def play(study: Study) -> tuple[list[Point], bool, float]:
    """Simulate all modes at all loads; returns points and CPU seconds. Runs in its own process."""
    table, name, is_learned = study
    began_s, tables = time.process_time(), siblings(TABLES[table])
    modes = get_args(BatchingMode)
    case = Comparison(name, mix(name, tables), modes, LOADS, SEEDS, COUNT, is_learned=is_learned)
    points = list(compare(Model(tables), case))
    if missed := [v.load for v in verdicts(points, FUSING_PAYS, is_learned=is_learned) if v.broken]:
        again = compare(Model(tables), replace(case, loads=missed, seeds=MORE_SEEDS))
        points = [point for point in points if point.load not in missed] + list(again)
    return points, is_learned, time.process_time() - began_s


def play_all(processes: int | None) -> None:
    """Write the data file and the plots."""
    known_points: list[Point] = []
    took_s, rows = 0.0, []
    with Pool(processes) as pool:
        for points, is_learned, seconds in pool.imap(play, list(studies())):
            took_s += seconds
            known_points += [] if is_learned else points
            for verdict in verdicts(points, FUSING_PAYS, is_learned=is_learned):
                rows.append(row(verdict))
                click.echo(f"{rows[-1][3]}: {verdict}")
    with DATA.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    draw(known_points)
    click.echo(f"{took_s:.0f} s of one core")


def row(point: Verdict) -> list[str]:
    """A line of the data file."""
    costs = "learned" if point.is_learned else "known"
    ratios = (f"{ratio:.4f}" for ratio in (point.mean, point.p99, point.goodput))
    return [point.table, point.mix, f"{point.load:g}", costs, *ratios, str(point.seeds)]


def read() -> list[Verdict]:
    """The points of the data file."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return [
            Verdict(
                line["table"],
                line["mix"],
                float(line["load"]),
                float(line["mean"]),
                float(line["p99"]),
                float(line["goodput"]),
                line["table"] in FUSING_PAYS
                and (line["mix"], float(line["load"])) == ("steps", GOODPUT_LOAD),
                line["costs"] == "learned",
                int(line["seeds"]),
            )
            for line in csv.DictReader(file)
        ]


def draw(points: Sequence[Point]) -> None:
    """Draw a plot for each mix in `PLOTTED_MIXES`, with a row for each table."""
    for name in PLOTTED_MIXES:
        rows = [
            (table, [plotted(p) for p in points if (p.table, p.mix) == (table, name)])
            for table in DRAWN_TABLES
        ]
        plot.draw(rows, PAGE.with_name(f"scheduling-{name}.png"))


def page(points: Sequence[Verdict]) -> str:
    """The whole page."""
    loads = " and ".join([", ".join(f"{load:g}" for load in LOADS[:-1]), f"{LOADS[-1]:g}"])
    lines = [
        INTRODUCTION.format(count=COUNT, seeds=len(SEEDS), more=len(MORE_SEEDS), loads=loads),
        *promise(points),
    ]
    for device, is_of in DEVICES.items():
        lines += ["", f"## {device}", "", *table_of([p for p in points if is_of(p.table)])]
    lines += ["", "## Plots", "", "With known costs, a row for each table.", ""]
    for name in PLOTTED_MIXES:
        lines.append(f"![Latency and requests in time, mix {name}](scheduling-{name}.png)")
    return "\n".join([*lines, "", PEERS])


def promise(points: Sequence[Verdict]) -> Iterator[str]:
    """Lines with each limit and its measured value, and the points that break the promise."""
    yield "| costs | limit | promised at most | measured | kept |"
    yield "| --- | --- | ---: | ---: | --- |"
    for costs, is_learned in (("known", False), ("learned", True)):
        of_costs = [point for point in points if point.is_learned == is_learned]
        for limit in limits(of_costs, is_learned=is_learned):
            kept = "yes" if limit.is_kept else "**no**"
            yield f"| {costs} | {limit.name} | {limit.most:g} | {limit.value:.3f} | {kept} |"
    floored = [
        statistics.fmean(max(point.mean, 1.0) for point in points if point.is_learned == is_learned)
        for is_learned in (False, True)
    ]
    tables = ", ".join(f"`{name}`" for name in FUSING_PAYS)
    yield ""
    yield "Points where `continuous` is far ahead lower a mean of ratios. If every ratio below 1"
    yield f"counts as 1, the mean is {floored[0]:.3f} with known costs"
    yield f"and {floored[1]:.3f} with learned ones."
    yield f"A further promise, for {tables} at load {GOODPUT_LOAD:g} of mix `steps`:"
    yield f"{LEAST_GOODPUT:g} times as many requests in time as `dynamic` and `request`."
    yield ""
    broken = [point for point in points if point.broken]
    end = "; missed at:" if broken else "."
    yield f"Each of {len(points) // 2} points counts twice, with known and with learned costs."
    again = sum(point.seeds > len(SEEDS) for point in points)
    yield f"{again} of these {len(points)} were simulated with {len(MORE_SEEDS)} seeds."
    yield f"The limits hold at {len(points) - len(broken)} of {len(points)}{end}"
    yield ""
    for point in broken:
        yield f"- {'learned' if point.is_learned else 'known'} costs, {point}"


def table_of(points: Sequence[Verdict]) -> Iterator[str]:
    """Mean and worst ratios of each cost table, over its mixes and loads."""
    yield "| table | mean, known | p99, known | mean, learned | p99, learned |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for table in dict.fromkeys(point.table for point in points):
        cells = [table]
        for is_learned in (False, True):
            own = [p for p in points if p.table == table and p.is_learned == is_learned]
            cells += [
                f"{statistics.fmean(ratios):.3f}, worst {max(ratios):.3f}"
                for ratios in ([p.mean for p in own], [p.p99 for p in own])
            ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
