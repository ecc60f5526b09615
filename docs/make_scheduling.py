"""Play every mode on every built-in table and mix: docs/scheduling.csv, its two plots, its page.

usage: make simulate    (exits with 1 if a limit of the promise is not kept, and names the points)

`--page` plays nothing: it writes the page from the data file.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import get_args

import click
from scheduling_promise import GOODPUT_LOAD, LEAST_GOODPUT, Verdict, limits, verdicts

from carpool.config import BatchingMode
from carpool_lab.simulate.plot import draw_points
from carpool_lab.simulate.report import Point
from carpool_lab.simulate.scenario import MIXES, Comparison, Model, compare, mix
from carpool_lab.tables import TABLES, siblings

PAGE = Path(__file__).parent / "scheduling.md"
DATA = PAGE.with_suffix(".csv")
LOADS = (0.6, 0.9, 2.0)
SEEDS = range(2)
COUNT = 300  # requests of a seed
FUSING_PAYS = ("flux-512-streamed", "qwen-512-streamed", "sana-512")
DRAWN = ("uniform", "steps")
DRAWN_TABLES = ("flux-512", "qwen-512", "sana-512", "qwen-512-streamed")
DEVICES: Mapping[str, Callable[[str], bool]] = {
    "H200, weights resident": lambda table: "streamed" not in table,
    "24 GB card, weights streamed": lambda table: "streamed" in table,
}
COLUMNS = ("table", "mix", "load", "costs", "mean", "p99", "goodput")

INTRODUCTION = """\
# Scheduling

Made by `make simulate`; do not edit. All points: [scheduling.csv](scheduling.csv). The modes are
the functions that serve; only the device is simulated: a forward takes the seconds of a cost table,
and nothing else takes time. The tables and their sources are in `src/carpool_lab/tables.py`; most
are estimates.

| mode | rule |
| --- | --- |
| `off` | one request after the other |
| `dynamic` | batches of 8 at admission, of requests equal but for prompt and seed, 5 ms of delay |
| `request` | waves of 8 at admission, of equal neighbours in line, 20 ms of wait |
| `continuous` | any calls share any forward, as wide as pays, chosen anew at every forward |

The mixes: `uniform` has the model's usual number of steps; `steps` mixes 8, 20 and 50 steps with
three guidance values; `sizes` mixes the sizes of the model; in `tenants` every tenth request has
priority 5. Load 1 is the capacity of the device if every denoising step has the fastest width; no
mode is wider than 8 requests. The loads are {loads}. Arrivals are random (Poisson), {count}
requests for each of {seeds} seeds; so few leave a single point of learned costs uncertain. In time
means within 5 times the request's latency alone. Any other point: `carpool simulate --table
sana-512 --mix steps --compare off,dynamic,request,continuous --loads 0.3,1.2`.

With **known** costs the policy has the cost table itself. With **learned** costs forwards are those
of a machine with neighbours: they vary by 20 % (lognormal), one in a hundred takes ten times as
long, in phases of half a minute everything takes twice as long, and after ten minutes the device is
30 % slower. There `continuous` starts with no costs (first seed), or with a table that is wrong by
4 times at one width of each kind (second seed), and learns from its own forwards. The other modes
need no costs.

## The promise

Every figure is `continuous` over the best of the other three modes, at the same point, on the same
requests; below 1 it is faster.
"""

PEERS = """\
## The peers' modes, to the letter

`dynamic` is SGLang-Diffusion's batching (0.5.23), `request` is vLLM-Omni's at request level
(0.30.0): the same flags, files, batches and log lines. A request with n outputs is one request in
both, as there; in `continuous` and `off` its outputs are scheduled one by one. A batch runs as wide
as the mode's own cap says, whatever `--max-batch-size` is. What differs, and why:

In `dynamic`:

- *`--batching-delay-ms` counts from.* There: when its loop reads the request, after the forward
  that runs. Here: the request's arrival, since a request that has waited through a forward has
  waited.
- *Look-ahead behind the head.* There: the whole queue. Here: 1024 requests, since one
  decision must take bounded time.
- *Families.* There: Wan TI2V, LTX-2, HunyuanVideo and others are never batched. Here: all are,
  since calls that cannot share a forward run one after the other, which is what they do there.
- *Adapters.* There: one set for the whole server. Here: of a request; must be equal, since
  requests choose them here.
- *A parameter left out.* There: as the class of the model's parameters fills it in. Here: equal
  to the pipeline's default said, since they ask for the same.
- *The outputs of one request.* There: arrive in one message. Here: may arrive apart: those that
  come 0.1 s after the others are another batch, since each can be cancelled and restarted alone.
- *Batch lines in the log.* There: `Processed ...` and `Batch admission ...` always. Here: all
  with `--enable-batching-metrics`, since logs are quiet unless asked.
- *A batch that fails.* There: all its requests fail. Here: only the request that is at fault,
  see docs/reliability.md.

In `request`:

- *Negative prompts.* There: used if not empty and `guidance_scale`, as the request says it, is
  above 1. Here: the same, but a scale left out is the pipeline's default, since left out is the
  same as the default said.
- *Other arguments that its key has no field for.* There: may differ. Here: must be equal, since
  what differs there is served with the head's value, or not, by the pipeline.
- *Prompts, pictures, latents.* There: may be there or not, unless the pipeline sets a condition
  key. Here: all have them or none, since with and without a picture are different calls, which
  share no forward.
- *`None` and a default.* There: differ. Here: are the same, since they ask for the same.
- *Pipelines without batch support.* There: refused at the start with `--max-num-seqs` above 1.
  Here: all are taken, since any diffusers pipeline runs here.

Rules files and deploy files: what the peers read, this reads. Beyond that a rule may have a
`comment`. Refused though they would be taken there: NaN and infinite caps, a fraction of a batch,
a key that stands twice in one object.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="only the page, from the data file")
    parser.add_argument("--processes", type=int, help="as many as there are cores")
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
"""A table, a mix, and whether costs are learned."""


def studies() -> Iterator[Study]:
    """Every table with every mix; the sizes of a model once, under the smallest of two."""
    for table in TABLES.values():
        for name in MIXES:
            if name != "sizes" or (len(siblings(table)) > 1 and table.side_px == 512):
                yield from ((table.name, name, is_learned) for is_learned in (False, True))


def play(study: Study) -> tuple[list[Point], bool, float]:
    """All modes at all loads of a study, and its seconds of one core. In a process of its own."""
    table, name, is_learned = study
    began_s, tables = time.process_time(), siblings(TABLES[table])
    modes = get_args(BatchingMode)
    wanted = Comparison(name, mix(name, tables), modes, LOADS, SEEDS, COUNT, is_learned=is_learned)
    return list(compare(Model(tables), wanted)), is_learned, time.process_time() - began_s


def play_all(processes: int | None) -> None:
    """Write the data file and the plots."""
    known: list[Point] = []
    took_s, rows = 0.0, []
    with Pool(processes) as pool:
        for points, is_learned, seconds in pool.imap(play, list(studies())):
            took_s += seconds
            known += [] if is_learned else points
            for verdict in verdicts(points, FUSING_PAYS, is_learned=is_learned):
                rows.append(row(verdict))
                click.echo(f"{rows[-1][3]}: {verdict}")
    with DATA.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    draw(known)
    click.echo(f"{took_s:.0f} s of one core")


def row(point: Verdict) -> list[str]:
    """A line of the data file."""
    costs = "learned" if point.is_learned else "known"
    ratios = (f"{ratio:.4f}" for ratio in (point.mean, point.p99, point.goodput))
    return [point.table, point.mix, f"{point.load:g}", costs, *ratios]


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
            )
            for line in csv.DictReader(file)
        ]


def draw(points: Sequence[Point]) -> None:
    """A picture for each mix of `DRAWN`, a row for each table."""
    for name in DRAWN:
        rows = [
            (table, [point for point in points if (point.table, point.mix) == (table, name)])
            for table in DRAWN_TABLES
        ]
        draw_points(rows, PAGE.with_name(f"scheduling-{name}.png"))


def page(points: Sequence[Verdict]) -> str:
    """The whole page."""
    loads = " and ".join([", ".join(f"{load:g}" for load in LOADS[:-1]), f"{LOADS[-1]:g}"])
    lines = [INTRODUCTION.format(count=COUNT, seeds=len(SEEDS), loads=loads), *promise(points)]
    for device, is_of in DEVICES.items():
        lines += ["", f"## {device}", "", *table_of([p for p in points if is_of(p.table)])]
    lines += ["", "## Plots", "", "With known costs, a row for each table.", ""]
    for name in DRAWN:
        lines.append(f"![Latency and requests in time, mix {name}](scheduling-{name}.png)")
    return "\n".join([*lines, "", PEERS])


def promise(points: Sequence[Verdict]) -> Iterator[str]:
    """Each limit and its measured value, and the points that break theirs."""
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
    yield "Points where `continuous` is far ahead lower a mean of ratios. With every ratio below 1"
    yield f"counted as 1 the mean is {floored[0]:.3f} with known costs and {floored[1]:.3f} with"
    yield f"learned ones. On {tables} the promise"
    yield f"adds, at load {GOODPUT_LOAD:g} of mix `steps`, {LEAST_GOODPUT:g} times as many requests"
    yield "in time as `dynamic` and `request` have."
    yield ""
    broken = [point for point in points if point.broken]
    end = "; missed at:" if broken else "."
    yield f"Kept at {len(points) - len(broken)} of {len(points)} single points{end}"
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
