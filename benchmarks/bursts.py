"""Closed bursts, live: `continuous` with learned costs against the other modes, in one process.

usage: OMP_NUM_THREADS=1 python -m benchmarks.bursts [--quick] [--only WORDS] [--limit-s S]
           [--output docs/benchmarks.md]

A part is a model (`shapes`, a small FLUX, a small Qwen-Image with guidance), a mix (equal requests,
mixed steps, mixed steps and guidance) and a machine (quiet, or with a process that occupies a core
in phases of ten seconds). In a part every mode has its own engine; a round sends a burst of 16
requests to each engine, in random order. `continuous` has two engines: one without learned costs,
and one with a table that is wrong by 4 times at one width of each kind. The first burst of each
engine is not counted. All engines share one heap: `process.with_one_heap`. Rounds continue until
both promises are kept or missed by two standard errors, or for some minutes.

Each finished part is written to `build/bursts.json` and not repeated: a stopped run resumes
(`--fresh` restarts). `--only shapes/equal,busy` selects the parts whose names have one of these
words. The rows of all parts go between two marks of the page.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

import carpool
from benchmarks.bursts_page import PHASE_S, WRONG, Played, Row, page, put, rows
from benchmarks.gpu_build import filled, pipeline_of, request, weightless
from benchmarks.gpu_models import Model
from benchmarks.gpu_tiny import tiny
from benchmarks.process import with_one_heap

RESULT = Path(__file__).parents[1] / "build" / "bursts.json"
CLIENTS = 16

MODELS = ("shapes", "flux", "qwen-image")
MIXES = ("equal", "steps", "steps+guidance")
MACHINES = ("quiet", "busy")
PARTIES: Mapping[str, Mapping[str, Any]] = {
    "off": {"batching_mode": "off"},
    "dynamic": {"batching_mode": "dynamic", "batching_max_size": 8, "batching_delay_ms": 5.0},
    "request": {"batching_mode": "request", "max_num_seqs": 8},
    "continuous": {"batching_mode": "continuous"},
    "continuous, wrong table": {"batching_mode": "continuous"},
}
WIDER: Mapping[str, Mapping[str, Any]] = {  # forwards take some ms, as on a device
    "flux": {
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    },
    "qwen-image": {
        "num_layers": 3,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    },
}


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort of a measurement."""

    rounds: int  # minimum
    most_s: float  # time limit for undecided parts
    equal: int  # steps
    mixed: tuple[int, ...]


WHOLE = Effort(rounds=7, most_s=200.0, equal=12, mixed=(6, 9, 14, 20))
QUICK = Effort(rounds=3, most_s=0.0, equal=6, mixed=(3, 4, 6, 9))


def parts(*, is_quick: bool = False) -> list[str]:
    """All parts, or the parts of `--quick`: one mix per kind, busy only for the first model."""
    return [
        f"{model}/{mix}/{machine}"
        for model, mix, machine in product(MODELS, MIXES, MACHINES)
        if not is_quick or (mix != "steps" and (machine == "quiet" or model == MODELS[0]))
    ]


def model_of(name: str) -> Model:
    """A tiny model of the GPU benchmark, with a larger denoiser."""
    small = tiny(name)
    denoiser, config = small.denoiser
    return replace(small, denoiser=(denoiser, {**config, **WIDER[name]}))


def loaded(name: str) -> Any:
    """The argument of `carpool.load`: a name, or a pipeline with random weights."""
    if name == "shapes":
        return name
    model, cpu = model_of(name), torch.device("cpu")
    modules = (filled(weightless(part), cpu, torch.float32) for part in (model.denoiser, model.vae))
    return pipeline_of(model, *modules)


def requests(name: str, mix: str, effort: Effort) -> list[carpool.Request]:
    """A burst, equal for all modes and rounds."""
    steps = [effort.equal] if mix == "equal" else list(effort.mixed)
    strengths = (1.0, 0.75, 1.25) if "guidance" in mix else (1.0,)
    burst = []
    for n in range(CLIENTS):
        strength, count = strengths[n % len(strengths)], steps[n % len(steps)]
        if name == "shapes":
            burst.append(
                carpool.Request(
                    "a red circle on a blue background",
                    seed=n,
                    num_inference_steps=count,
                    guidance_scale=2.0 * strength,
                )
            )
            continue
        model = model_of(name)
        [size] = model.sizes
        guided = {key: value * strength for key, value in model.guided.items()}
        burst.append(
            request(
                replace(model, guided=guided),
                size,
                count,
                torch.device("cpu"),
                seed=n,
                dtype=torch.float32,
            )
        )
    return burst


def play(engine: carpool.Engine, burst: Sequence[carpool.Request]) -> Played:
    """Send a burst."""
    before = forwards(engine)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = engine.generate(list(burst), progress=False)
    took_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - cpu_s
    mean_s = statistics.fmean(output.timings.total_s for output in outputs)
    return Played(len(burst) / took_s, mean_s, cpu_s, forwards(engine) - before)


def forwards(engine: carpool.Engine) -> int:
    """The number of forwards that an engine has run, of all modules."""
    return sum(entry["count"] for entry in engine.statistics()["forwards"])


def wrong_table(path: Path, to: Path, seed: int) -> None:
    """Copy a table, with an error of 4 times at one width of each kind."""
    data, rng = json.loads(path.read_text()), random.Random(seed)
    for entry in data["costs"]:
        width = rng.choice(sorted(entry["seconds"]))
        entry["seconds"][width] *= rng.choice((WRONG, 1 / WRONG))
    to.write_text(json.dumps(data))


@contextmanager
def neighbour(kind: str) -> Iterator[None]:
    """Run a process that occupies a core in phases, for busy parts."""
    if kind == "quiet":
        yield
        return
    code = (
        "import os, time\n"
        "parent = os.getppid()\n"
        "while os.getppid() == parent:\n"  # it ends with its parent, even a killed one
        f"    end = time.monotonic() + {PHASE_S}\n"
        "    while time.monotonic() < end: pass\n"
        f"    time.sleep({PHASE_S})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(part: str, effort: Effort) -> list[Row]:
    """All rounds of a part."""
    name, mix, kind = part.split("/")
    burst, model = requests(name, mix, effort), loaded(name)
    rounds: dict[str, list[Played]] = {party: [] for party in PARTIES}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tables = {party: Path(folder) / f"{n}.json" for n, party in enumerate(PARTIES)}
        right = Path(folder) / "right.json"
        with carpool.load(model, cost_table=str(right), batching_mode="continuous") as teacher:
            for _ in range(2):
                play(teacher, burst)
        wrong_table(right, tables["continuous, wrong table"], seed=parts().index(part))
        engines = {
            party: stack.enter_context(
                carpool.load(loaded(name), cost_table=str(tables[party]), **settings)
            )
            for party, settings in PARTIES.items()
        }
        stack.enter_context(neighbour(kind))
        order, rng = list(PARTIES), random.Random(part)
        for party in order:  # the first burst of an engine is a warm-up
            play(engines[party], burst)
        began_s, table_rows = time.monotonic(), list[Row]()
        while not table_rows or time.monotonic() < began_s + effort.most_s:
            rng.shuffle(order)  # so that a neighbour's phases hit all parties alike
            for party in order:
                rounds[party].append(play(engines[party], burst))
            if len(rounds[party]) >= effort.rounds:
                table_rows = rows(part, rounds)
                if all(row.is_decided for row in table_rows):
                    break
    return table_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few parts: below four minutes")
    parser.add_argument("--only", default="", help="parts with one of these words in their names")
    parser.add_argument("--limit-s", type=float, help="latest start of a part  [5400; quick: 200]")
    parser.add_argument("--fresh", action="store_true", help="forget parts of an earlier run")
    parser.add_argument("--output", type=Path, help="page for the rows")
    options = parser.parse_args()
    words = options.only.split(",")
    every = parts(is_quick=options.quick)
    part_names = [part for part in every if any(word in part for word in words)]
    if not part_names:
        parser.error(f"--only {options.only}: there are {', '.join(every)}")
    effort, path = (QUICK, RESULT.with_suffix(".quick.json")) if options.quick else (WHOLE, RESULT)
    limit_s = options.limit_s or (200.0 if options.quick else 5400.0)
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    results: dict[str, list[dict[str, Any]]] = {}
    if path.exists() and not options.fresh:
        results = json.loads(path.read_text())
    began_s, skipped = time.monotonic(), []
    for part in part_names:
        if part in results:
            continue
        if time.monotonic() - began_s > limit_s:
            skipped.append(part)
            continue
        table_rows = measure(part, effort)
        results[part] = [asdict(row) for row in table_rows]
        for row in table_rows:
            print(
                f"{row.part}, {row.table}: {row.per_s:.2f}/s, throughput {row.throughput:.3f} and "
                f"mean latency {row.latency:.3f}, CPU time {row.cpu:.2f} of the best other, "
                f"{row.rounds} rounds",
                file=sys.stderr,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1))
    if skipped:
        print(f"not made within {limit_s:g} s: {', '.join(skipped)}", file=sys.stderr)
    table_rows = [Row(**cells) for part in every for cells in results.get(part, [])]
    if not table_rows:
        return 1
    text = page(table_rows, CLIENTS, is_quick=options.quick)
    print(text)
    if options.output:
        put(text, options.output)
    return 0


if __name__ == "__main__":
    with_one_heap()
    raise SystemExit(main())
