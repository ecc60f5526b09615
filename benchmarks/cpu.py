"""The engine against plain diffusers, on this CPU, with the embedded model.

usage: make bench       (or: OMP_NUM_THREADS=1 python -m benchmarks.cpu [--write])

The engine runs in one process and plain diffusers in another, as in an application, without the
engine's patches of libraries. They take turns. The measure is CPU time of the whole process with
all threads, so other work on the machine does not count. Tables show medians, and ratios are
medians of the ratios within a turn, so they are robust when the machine's speed drifts. Equal
forwards differ by up to 8 % between processes, because of memory placement, so several pairs of
processes are measured.

The *ceiling* of a run is the same forwards without pipeline and engine: the best that an engine
without overhead could reach: see `forward_log`. The overhead of models with longer forwards has
as many milliseconds, but a smaller share.

All threads share one heap: `with_one_heap`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline

import carpool
from benchmarks.forward_log import ForwardLog, wrapped_forwards
from benchmarks.process import cpu_s, new_process, with_one_heap
from carpool.models.embedded import MODEL_DIR
from proof.page import BENCHMARKS, machine, table, write_section
from training.shapes.draw import prompts

DEFAULTS: dict[str, Any] = {"width": 64, "height": 64, "max_sequence_length": 16}
STEPS = (8, 12, 16, 20, 24, 28, 32, 36)
PROMPTS = prompts(8)
REQUESTS = [
    carpool.Request(prompt, seed=i, num_inference_steps=STEPS[i % 8], guidance_scale=2 + i % 4)
    for i, prompt in enumerate(PROMPTS)
]


class Plain:
    """Plain diffusers in a separate process."""

    pipe: Any = None  # set in that process

    def __init__(self) -> None:
        self._process = new_process(initializer=self._load)

    @classmethod
    def _load(cls) -> None:
        cls.pipe = DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
        cls.pipe.set_progress_bar_config(disable=True)

    @classmethod
    def _run(cls, requests: Sequence[carpool.Request]) -> None:
        for request in requests:
            generator = torch.Generator().manual_seed(request.seed or 0)
            cls.pipe(request.prompt, **DEFAULTS, **request.parameters, generator=generator,
                     output_type="pil")  # fmt: skip

    @classmethod
    def _cpu_s(cls, requests: Sequence[carpool.Request]) -> float:
        return cpu_s(lambda: cls._run(requests))

    def cpu_s(self, requests: Sequence[carpool.Request]) -> float:
        """CPU seconds of these requests in sequence."""
        return self._process.submit(self._cpu_s, requests).result()

    def close(self) -> None:
        self._process.shutdown()


def one_turn(plain: Plain, engine: carpool.Engine) -> dict[str, float]:
    """Measure one request in each way."""
    single = [carpool.Request(PROMPTS[0], seed=1)]
    return {
        "one plain": plain.cpu_s(single),
        "one engine": cpu_s(lambda: engine.generate(single, **DEFAULTS)),
    }


def turn(
    plain: Plain, engine: carpool.Engine, off: carpool.Engine, log: ForwardLog
) -> dict[str, float]:
    """Measure sixteen requests in each way."""
    seconds = of_burst(engine, log, REQUESTS, **DEFAULTS)
    seconds["off"] = cpu_s(lambda: off.generate(REQUESTS, **DEFAULTS))
    seconds["plain"] = plain.cpu_s(REQUESTS)
    return seconds


def of_burst(
    engine: carpool.Engine, log: ForwardLog, burst: Sequence[carpool.Request], **parameters: Any
) -> dict[str, float]:
    """Measure a burst in the engine, and its bare forwards."""
    log.sizes.clear()
    began_s = time.perf_counter()
    with wrapped_forwards(log):
        engine_s = cpu_s(lambda: engine.generate(burst, **parameters))
    clock_s, count = time.perf_counter() - began_s, len(log.sizes)
    bare_s = cpu_s(lambda: log.bare(log.sizes))
    return {"engine": engine_s, "engine wall": clock_s, "ceiling": bare_s, "forwards": count}


@dataclass
class Measured:
    """Measurements of one or several pairs of processes."""

    singles: list[dict[str, float]] = field(default_factory=list)  # turns with one request
    turns: list[dict[str, float]] = field(default_factory=list)  # turns with sixteen requests


def summary(measured: Measured) -> str:
    """A table of the runs; ratios are taken within a turn."""

    def of(name: str) -> Sequence[dict[str, float]]:
        return measured.singles if name.startswith("one") else measured.turns

    def median(name: str) -> float:
        return statistics.median(times[name] for times in of(name))

    def ratio(above: str, below: str) -> float:
        return statistics.median(times[above] / times[below] for times in of(above))

    n = len(REQUESTS)
    forwards = [times["forwards"] for times in measured.turns]
    count = f"{min(forwards)} to {max(forwards)}" if len(set(forwards)) > 1 else f"{forwards[0]}"
    rows = [
        ("one request, 28 steps: plain diffusers", f"{median('one plain') * 1e3:.0f} ms", ""),
        ("one request, 28 steps: engine", f"{median('one engine') * 1e3:.0f} ms",
         f"{ratio('one plain', 'one engine'):.2f}x the speed of plain diffusers (goal 0.97)"),
        (f"{n} requests, 8-36 steps: plain diffusers in sequence", f"{median('plain'):.2f} s", ""),
        (f"{n} requests: engine, `off`", f"{median('off'):.2f} s",
         f"{ratio('plain', 'off'):.2f}x plain diffusers"),
        (f"{n} requests: engine, `continuous`", f"{median('engine'):.2f} s",
         f"{ratio('plain', 'engine'):.2f}x plain diffusers, {ratio('off', 'engine'):.2f}x `off`; "
         f"by the clock {median('engine wall'):.2f} s"),
        (f"the same forwards bare (the ceiling): {count}", f"{median('ceiling'):.2f} s",
         f"engine reaches {ratio('ceiling', 'engine'):.2f} of it (goal 0.95); the ceiling is "
         f"{ratio('plain', 'ceiling'):.2f}x plain diffusers"),
    ]  # fmt: skip
    return table(["run", "CPU time, median", "comparison"], rows)


def measure(turns: int) -> Measured:
    """Measure in this process and in one of plain diffusers; the first turns are warm-up."""
    plain, measured = Plain(), Measured()
    pipe = DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    log = ForwardLog()
    engine, off = carpool.load(pipe), carpool.load("shapes", batching_mode="off")
    measured.singles = [one_turn(plain, engine) for _ in range(3 * turns + 2)][2:]
    measured.turns = [turn(plain, engine, off, log) for _ in range(turns + 1)][1:]
    for runner in (engine, off, plain):
        runner.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3, help="of each process")
    parser.add_argument("--write", action="store_true", help="write to docs/benchmarks.md")
    options = parser.parse_args()
    whole = Measured()
    for i in range(options.processes):
        print(f"processes {i + 1} of {options.processes}", file=sys.stderr)
        with new_process() as process:
            measured = process.submit(measure, options.turns).result()
        whole.singles += measured.singles
        whole.turns += measured.turns
    section = (
        "`make bench` measures CPU time of the whole process: medians of "
        f"{options.processes} pairs of processes,\n{options.turns} turns in each (three times as "
        "many for one request); ratios are medians within a turn.\n"
        f"Machine: {machine()}, {torch.get_num_threads()} thread(s) for torch {torch.__version__}."
        f"\n\n{summary(whole)}\n"
    )
    print(section)
    if options.write:
        write_section("cpu", section, BENCHMARKS)


if __name__ == "__main__":
    with_one_heap()
    main()
