"""Play every mode on every built-in table and mix, write `docs/scheduling.md`, hold the promise up.

usage: make simulate    (exits with 1 if the promise is broken, and says where)

It takes about 80 minutes of one core. Each study (a table and a mix) is kept in `build/simulate` as
soon as it is done, under a hash of the code that it stands on, and is not made again while that is
the same: a run that was stopped goes on where it was. `--part known` or `--part learned` makes one
half, without the page.
"""

import argparse
import ast
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from multiprocessing import Pool
from pathlib import Path
from typing import get_args

import click
from scheduling_promise import (
    GOODPUT_LOAD,
    LEAST_GOODPUT,
    MOST_MEAN,
    MOST_MEAN_LEARNED,
    MOST_P99,
    MOST_P99_LEARNED,
    Verdict,
    verdicts,
)

from carpool.config import BatchingMode
from carpool_lab.simulate.plot import draw_points
from carpool_lab.simulate.report import Point, comparison
from carpool_lab.simulate.scenario import MIXES, Comparison, Model, compare, mix, play
from carpool_lab.tables import TABLES, Table, siblings
from carpool_lab.workload import bursts, generators, plan

PAGE = Path(__file__).parent / "scheduling.md"
SOURCE = PAGE.parents[1] / "src"
KEPT = PAGE.parents[1] / "build" / "simulate"
LOADS = (0.1, 0.3, 0.6, 0.9, 1.2, 2.0, 3.0)
SEEDS = {False: range(6), True: range(40)}  # at most, and where costs are learned
LEAST_S = {False: 0.0, True: 750.0}  # of a seed: the device changes after 600 s
CERTAIN = 0.01  # standard error of ratios of means: then no more seeds are played
COUNTS = {False: 600, True: 400}  # requests of a seed, and where costs are learned
MOST = 6000  # requests of a seed
FUSING_PAYS = ("flux-512-streamed", "qwen-512-streamed", "sana-512")
DRAWN = ("uniform", "steps")

INTRODUCTION = """\
# Scheduling

Made by `make simulate`; do not edit. The modes are the very functions that serve; only the device
is simulated: a forward takes what a cost table says, and nothing else takes any time. The tables
are in `src/carpool_lab/tables.py`, with their sources; most are estimates.

| mode | what it does |
| --- | --- |
| `off` | one request after the other |
| `dynamic` | batches of 8 at admission, of requests equal but for prompt and seed, 5 ms of delay |
| `request` | waves of 8 at admission, of equal neighbours in line, 20 ms of wait |
| `continuous` | any calls share any forward, as wide as is worth it, chosen anew at every forward |

`uniform` is the model's usual number of steps; `steps` mixes 8, 20 and 50 of them with three
guidance values; `sizes` mixes 512 and 1024 px; in `tenants` every tenth request has priority 5.
Load 1 is what the device can do if every denoising step is as wide as is fastest; none is wider
than 8 requests, in any mode. Arrivals are
random (Poisson), {count} requests for each of two to {seeds} seeds: as many as it takes until the
standard error of the mean of `continuous`, as a multiple of the best other mode's, is {certain:.0%}
or less, and what is promised is decided (Student's t, 95 %); it is said below. *In time* is within
5 times the request's latency alone. One table by hand: `carpool simulate --table sana-512 --mix
steps --compare off,dynamic,request,continuous --output plot.png`.

## The promise

At every load `continuous` has a mean latency at most {mean:g} times and a p99 at most {p99:g} times
the best of the other three. At load {load:g} of mix `steps` it serves at least {goodput:g} times
as many requests in time as `dynamic` and as `request`, on {tables}.
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

LEARNED = """
## Where costs are learned

The same, with forwards as they are on a machine with neighbours: they vary by 20 % (lognormal), one
in a hundred takes ten times as long (of those that are shared as much as takes a hundredth of the
time), in phases of half a minute everything takes twice as long, and after ten minutes the device
is 30 % slower. `continuous` knows nothing at first (even seeds), or what a table says that is wrong
by 4 times at one width of each kind (odd seeds), and learns from its own forwards; the other modes
need no costs. There are up to {seeds} seeds, of {count} requests or more: as many as keep the
device busy for {least:g} s, so that it changes meanwhile, but no more than {most:g}, which on
`sana-512` is less than that. Promised: a mean latency at most {mean:g} times and a p99 at most
{p99:g} times the best of the others.
"""


def code() -> str:
    """A hash of all code that a simulation runs, without comments, and of what is asked of it."""
    files = [*(SOURCE / "carpool" / "schedule").rglob("*.py")]
    files += [*(SOURCE / "carpool_lab" / "simulate").glob("*.py")]
    files += [SOURCE / "carpool_lab" / "workload.py", SOURCE / "carpool" / "types.py"]
    digest = sha256(repr((LOADS, SEEDS, LEAST_S, CERTAIN)).encode())
    for path in sorted(files):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(None)  # a docstring
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:12]


CODE = code()  # once: what is edited while this runs is not what runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    said = f"requests of a seed  [{COUNTS[False]}, where costs are learned {COUNTS[True]}]"
    parser.add_argument("--count", type=int, help=said)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--part", choices=("known", "learned"), help="the studies of one half")
    parser.add_argument("--processes", type=int, help="as many as there are cores")
    parser.add_argument(
        "--finished", action="store_true", help="play nothing: the page of what is finished so far"
    )
    arguments = parser.parse_args()
    points: list[Point] = []
    took_s = 0.0
    learned: list[Point] = []
    pairs = list(studies())
    ways = [
        way for part, way in (("known", False), ("learned", True)) if arguments.part in (None, part)
    ]
    counts = {way: arguments.count or count for way, count in COUNTS.items()}
    tasks = [(t.name, name, counts[way], way) for way in ways for t, name in pairs]
    lacking = dict.fromkeys(COUNTS, 0)  # studies
    if arguments.finished:
        for task in tasks:
            lacking[task[-1]] += not kept_in(task).exists()
        tasks = [task for task in tasks if kept_in(task).exists()]
    KEPT.mkdir(parents=True, exist_ok=True)
    with Pool(arguments.processes) as pool:
        for more, is_learned, seconds in pool.imap(study, tasks):
            (learned if is_learned else points).extend(more)
            took_s += seconds
            for verdict in verdicts(more, FUSING_PAYS, is_learned=is_learned):
                click.echo(f"{'learned' if is_learned else 'known'}: {verdict}")
    found = verdicts(points, FUSING_PAYS)
    mended = verdicts(learned, (), is_learned=True)
    if arguments.part is None:
        write(arguments, counts, points, found, mended, took_s, lacking)
    broken = [one for one in [*found, *mended] if one.broken]
    for verdict in broken:
        click.echo(f"broken: {verdict}", err=True)
    click.echo(f"kept at {len(found) + len(mended) - len(broken)} of {len(found) + len(mended)}")
    sys.exit(bool(broken))


def write(
    arguments: argparse.Namespace,
    counts: Mapping[bool, int],
    points: Sequence[Point],
    found: Sequence[Verdict],
    mended: Sequence[Verdict],
    took_s: float,
    lacking: Mapping[bool, int],
) -> None:
    """Make the page and its pictures."""
    pictures = draw(points, arguments.output.parent)
    text = "\n".join(page(points, found, mended, pictures, counts, took_s, speed(), lacking))
    arguments.output.write_text(text + "\n", encoding="utf-8")


Task = tuple[str, str, int, bool]
"""A table, a mix, requests of a seed, and whether costs are learned."""


def kept_in(task: Task) -> Path:
    """The file that keeps a study, as this code plays it."""
    table, name, count, is_learned = task
    return KEPT / f"{CODE}-{table}-{name}-{count}-{'learned' if is_learned else 'known'}.pickle"


def study(task: Task) -> tuple[list[Point], bool, float]:
    """All modes at all loads on one table and mix, and what that took. In a process of its own."""
    table, name, count, is_learned = task
    kept = kept_in(task)
    if kept.exists():
        found: tuple[list[Point], bool, float] = pickle.loads(kept.read_bytes())
        return found
    result = played(table, name, count, is_learned=is_learned)
    beside = kept.with_suffix(".part")
    beside.write_bytes(pickle.dumps(result))
    beside.replace(kept)  # whole or not at all
    return result


def played(
    table: str, name: str, count: int, *, is_learned: bool
) -> tuple[list[Point], bool, float]:
    began_s, tables = time.process_time(), siblings(TABLES[table])
    modes = get_args(BatchingMode)
    wanted = Comparison(
        name,
        mix(name, tables),
        modes,
        LOADS,
        SEEDS[is_learned],
        count,
        LEAST_S[is_learned],
        MOST,
        is_learned=is_learned,
        certain=CERTAIN,
        promised=MOST_MEAN_LEARNED if is_learned else MOST_MEAN,
        promised_p99=MOST_P99_LEARNED if is_learned else MOST_P99,
    )
    return list(compare(Model(tables), wanted)), is_learned, time.process_time() - began_s


def studies() -> Iterator[tuple[Table, str]]:
    """Every table with every mix; a pair of sizes once, under the smaller."""
    for table in TABLES.values():
        for name in MIXES:
            if name != "sizes" or (len(siblings(table)) > 1 and table.side_px == 512):
                yield table, name


def speed() -> float:
    """Seconds of one core for 20,000 requests of 28 steps."""
    model = Model([TABLES["flux-512"]])
    when, what = generators(0)
    asked = mix("uniform", model.tables)
    times = bursts(GOODPUT_LOAD * model.capacity_qps(asked), when, size=1)
    arrivals = plan(times, asked, what, count=20_000)
    began_s = time.process_time()
    play(model, arrivals, "continuous")
    return time.process_time() - began_s


def draw(points: Sequence[Point], folder: Path) -> dict[str, str]:
    """A picture for each mix of `DRAWN`, a row for each table; their names by mix."""
    pictures = {}
    for name in DRAWN:
        rows = [
            (table, [point for point in points if (point.table, point.mix) == (table, name)])
            for table in TABLES
        ]
        pictures[name] = f"scheduling-{name}.png"
        draw_points(rows, folder / pictures[name])
    return pictures


def page(
    points: Sequence[Point],
    found: Sequence[Verdict],
    learned: Sequence[Verdict],
    pictures: dict[str, str],
    counts: Mapping[bool, int],
    took_s: float,
    speed_s: float,
    lacking: Mapping[bool, int],
) -> Iterator[str]:
    """The whole page, by lines."""
    yield INTRODUCTION.format(
        count=counts[False],
        seeds=len(SEEDS[False]),
        certain=CERTAIN,
        mean=MOST_MEAN,
        p99=MOST_P99,
        load=GOODPUT_LOAD,
        goodput=LEAST_GOODPUT,
        tables=", ".join(f"`{name}`" for name in FUSING_PAYS),
    )
    yield from promises(found, lacking[False])
    yield LEARNED.format(
        count=counts[True],
        seeds=len(SEEDS[True]),
        least=LEAST_S[True],
        most=MOST,
        mean=MOST_MEAN_LEARNED,
        p99=MOST_P99_LEARNED,
    )
    yield from promises(learned, lacking[True])
    yield f"\n{PEERS}"
    yield "\n## Pictures"
    for name, picture in pictures.items():
        yield f"\n![Latency and requests in time over load, mix {name}]({picture})"
    yield "\n## Numbers"
    yield f"\nThe study took {took_s:.0f} s of one core; 20,000 requests of 28 steps on `flux-512`"
    yield f"in `continuous` at load {GOODPUT_LOAD:g} take {speed_s:.1f} s."
    for table, name in dict.fromkeys((one.table, one.mix) for one in found):
        yield f"\n### {table}, {name}\n"
        yield comparison([p for p in points if (p.table, p.mix) == (table, name)])


def promises(found: Sequence[Verdict], lacking: int) -> Iterator[str]:
    """How far a promise is kept, a line for each table and mix; so many studies are lacking."""
    if lacking:
        yield f"{lacking} studies of this part were not finished when the page was written, and are"
        yield "not counted: `make simulate` goes on where it was stopped."
        yield ""
    kept = sum(not one.broken for one in found)
    yield f"Kept at {kept} of {len(found)} points. The table has the worst of each table and mix"
    yield "over all loads, as multiples of the best of the others (the mean with its standard error"
    yield "over seeds); goodput where it is promised."
    yield ""
    yield "| table | mix | mean | p99 | goodput | broken at |"
    yield "| --- | --- | ---: | ---: | ---: | --- |"
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for one in found:
        groups.setdefault((one.table, one.mix), []).append(one)
    for (table, name), ones in groups.items():
        promised = [f"{one.goodput:.2f}" for one in ones if one.must_fuse]
        broken = "; ".join(f"load {o.load:g}: {', '.join(o.broken)}" for o in ones if o.broken)
        worst, worst_p99 = max(ones, key=lambda one: one.mean), max(one.p99 for one in ones)
        mean = f"{worst.mean:.3f} ± {worst.error:.3f}"
        cells = [table, name, mean, f"{worst_p99:.3f}", "".join(promised), broken]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
