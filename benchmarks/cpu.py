"""The engine against plain diffusers, on this CPU, with the embedded model: two tables.

usage: make bench       (or: OMP_NUM_THREADS=1 python -m benchmarks.cpu [--output docs/...])

The engine runs in one process and plain diffusers in another, as an application would run it: what
an engine changes in the libraries while it runs is not there. They take turns. What counts is CPU
time of the whole process, all threads of the engine included: other work on the machine does not
count as ours. Tables show medians, and ratios are medians of the ratios within a turn, so that they
hold when the machine's speed drifts. The same forwards are up to 8 % faster or slower in one
process than in the next, by where their memory lies, so several pairs of processes are measured.

The *ceiling* of a run is the same forwards without any pipeline or engine around them: what an
engine that costs nothing could reach. They are those of the very burst that was measured: the
modules of the measured engine note the size of each call, and keep the arguments of the first call
of each size, and the bare run makes the same calls in the same order with these.

All threads share one heap: `with_one_heap`.
"""

import argparse
import functools
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

import carpool
from benchmarks.parts import FORWARDS, NOT_OURS, Parts, of_a_server
from carpool.models.embedded import MODEL_DIR
from carpool.request.parameters import check

DEFAULTS: dict[str, Any] = {"width": 64, "height": 64, "max_sequence_length": 16}
STEPS = (8, 12, 16, 20, 24, 28, 32, 36)
PROMPTS = [
    f"a {colour} {shape} on a {ground} background"
    for colour, shape, ground in zip(
        ("red", "green", "blue", "yellow", "purple", "white", "black", "red") * 2,
        ("circle", "square", "star", "ring", "cross", "triangle") * 3,
        ("white", "black", "yellow", "blue") * 4,
        strict=False,
    )
]
REQUESTS = [
    carpool.Request(prompt, seed=i, num_inference_steps=STEPS[i % 8], guidance_scale=2 + i % 4)
    for i, prompt in enumerate(PROMPTS)
]
ARENAS = "MALLOC_ARENA_MAX"  # of glibc: heaps that threads may have
HEAVY = {"text_encoder": "forward", "text_encoder_2": "forward", "transformer": "forward",
         "vae": "decode"}  # fmt: skip


class ForwardLog:
    """Notes the heavy calls that reach a pipeline's modules, to run as many of them again bare."""

    def __init__(self, pipe: Any, parts: Parts) -> None:
        self.sizes: list[tuple[Hashable, ...]] = []  # of each call, in their order
        self._samples: dict[tuple[Hashable, ...], Callable[[], Any]] = {}
        for component, method in HEAVY.items():
            module = getattr(pipe, component)
            original = parts.timed(FORWARDS, getattr(module, method))
            module.__dict__[method] = self._logged(component, original)

    def _logged(self, component: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # keeps the signature, by which the engine knows arguments
        def method(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            size = component, *[one.shape for one in values if isinstance(one, torch.Tensor)]
            self.sizes.append(size)
            if size not in self._samples:
                self._samples[size] = functools.partial(original, *args, **kwargs)
            return original(*args, **kwargs)

        return method

    def taken(self) -> list[tuple[Hashable, ...]]:
        """What was noted since the last time."""
        sizes, self.sizes = self.sizes, []
        return sizes

    @torch.no_grad()
    def bare(self, sizes: Sequence[tuple[Hashable, ...]]) -> None:
        """Run these calls and nothing else."""
        for size in sizes:
            self._samples[size]()


class Plain:
    """Plain diffusers in a process of its own."""

    pipe: Any = None  # in that process

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
        """CPU seconds of these requests, one after another."""
        return self._process.submit(self._cpu_s, requests).result()

    def close(self) -> None:
        self._process.shutdown()


def new_process(initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """A process that has nothing of this one."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=initializer)


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds of the process, all its threads."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def one_turn(plain: Plain, engine: carpool.Engine) -> dict[str, float]:
    """One request, each way."""
    single = [carpool.Request(PROMPTS[0], seed=1)]
    return {
        "one plain": plain.cpu_s(single),
        "one engine": cpu_s(lambda: engine.generate(single, **DEFAULTS)),
    }


def turn(
    plain: Plain, engine: carpool.Engine, off: carpool.Engine, log: ForwardLog
) -> dict[str, Any]:
    """Sixteen requests, each way."""
    log.taken()
    found: dict[str, Any] = {}
    began_s = time.perf_counter()
    found["engine"] = cpu_s(lambda: engine.generate(REQUESTS, **DEFAULTS))
    found["engine wall"] = time.perf_counter() - began_s
    sizes = log.taken()
    found["forwards"] = len(sizes)
    found["ceiling"] = cpu_s(lambda: log.bare(sizes))
    found["off"] = cpu_s(lambda: off.generate(REQUESTS, **DEFAULTS))
    found["plain"] = plain.cpu_s(REQUESTS)
    return found


def parts_of(engine: carpool.Engine, log: ForwardLog, parts: Parts) -> dict[str, float]:
    """CPU seconds by part of one burst of sixteen, with timers on."""
    log.taken()
    parts.install()
    parts.seconds.clear()
    began_s = time.thread_time()
    engine.generate(REQUESTS, **DEFAULTS)
    caller_s = time.thread_time() - began_s
    parts.remove()
    queued_s = parts.seconds["queueing (the caller's thread)"]
    checks = {"checks of requests (the caller's thread)": caller_s - queued_s}
    return {**parts.seconds, **checks, "count": float(len(log.taken()))}


def with_one_heap() -> None:
    """Begin this program again with one heap for all its threads, where the C library is glibc.

    With a heap for each thread, as is usual, equal engines of one process differ by up to 5 % for
    as long as it lives, by where the memory of their forwards happens to lie; with one, by 1 %
    (docs/experiments.md).
    """
    if os.environ.get(ARENAS) != "1":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, ARENAS: "1"})


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) for torch "
        f"{torch.__version__}, Python {platform.python_version()}"
    )


def table(ones: Sequence[dict[str, float]], turns: Sequence[dict[str, float]]) -> str:
    def of(name: str) -> Sequence[dict[str, float]]:
        return ones if name.startswith("one") else turns

    def median(name: str) -> float:
        return statistics.median(one[name] for one in of(name))

    def ratio(above: str, below: str) -> float:
        return statistics.median(one[above] / one[below] for one in of(above))

    n = len(REQUESTS)
    forwards = [one["forwards"] for one in turns]
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
         f"engine reaches {ratio('ceiling', 'engine'):.2f} of it (goal 0.90); the ceiling is "
         f"{ratio('plain', 'ceiling'):.2f}x plain diffusers"),
    ]  # fmt: skip
    lines = ["| what | CPU time, median | side by side |", "| --- | ---: | --- |"]
    return "\n".join([*lines, *(f"| {a} | {b} | {c} |" for a, b, c in rows)])


def parts_table(seen: Sequence[dict[str, float]], server: dict[str, float]) -> str:
    """Medians of bursts, part by part, the largest first; below, what a server adds."""
    n = len(REQUESTS)
    count = statistics.median(one["count"] for one in seen)
    names = {name for one in seen for name in one} - {"count"}
    spent = {name: statistics.median(one.get(name, 0.0) for one in seen) for name in names}
    all_s = sum(spent.values())

    def row(name: str, burst_s: float) -> str:
        cells = (
            f"{burst_s * 1e3:.1f}",
            f"{burst_s / all_s:.1%}",
            f"{burst_s / count * 1e6:.0f}",
            f"{burst_s / n * 1e3:.2f}",
        )
        return f"| {name} | {' | '.join(cells)} |"

    ordered = sorted(spent.items(), key=lambda one: -one[1])
    free_s = sum(spent.get(part, 0.0) for part in (FORWARDS, *NOT_OURS))
    lines = [
        f"An engine that costs nothing would reach {spent[FORWARDS] / free_s:.2f} of the forwards: "
        f"what is left of the parts is {', '.join(NOT_OURS)}.",
        "",
        "| part | ms a burst | share | us a forward | ms a request |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(row(name, seconds) for name, seconds in ordered),
        *(row(f"in a server: {name}", n * seconds) for name, seconds in server.items()),
    ]
    return "\n".join(lines)


@dataclass
class Measured:
    """Figures of one pair of processes, or of several."""

    ones: list[dict[str, float]] = field(default_factory=list)  # turns of one request
    turns: list[dict[str, Any]] = field(default_factory=list)  # of sixteen
    parts: list[dict[str, float]] = field(default_factory=list)  # where the engine's time went
    server: dict[str, float] = field(default_factory=dict)  # what a server adds


def measure(turns: int) -> Measured:
    """Measure in this process, and in one of plain diffusers; the first turns warm up."""
    plain, parts, found = Plain(), Parts(), Measured()
    mine = DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    log = ForwardLog(mine, parts)
    engine, off = carpool.load(mine), carpool.load("shapes", batching_mode="off")
    found.ones = [one_turn(plain, engine) for _ in range(3 * turns + 2)][2:]
    for _ in range(turns + 1):
        found.turns.append(turn(plain, engine, off, log))
        found.parts.append(parts_of(engine, log, parts))
    found.turns, found.parts = found.turns[1:], found.parts[1:]
    [output] = engine.generate(REQUESTS[:1], **DEFAULTS)
    steps = REQUESTS[0].parameters["num_inference_steps"]
    found.server = of_a_server(output.images[0], check(engine.card, REQUESTS[0]), steps)
    for one in (engine, off, plain):
        one.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3, help="of each process")
    parser.add_argument("--output", type=Path, help="write the page here as well")
    options = parser.parse_args()
    all_of_them = Measured()
    for i in range(options.processes):
        print(f"processes {i + 1} of {options.processes}", file=sys.stderr)
        with new_process() as process:
            found = process.submit(measure, options.turns).result()
        all_of_them.ones += found.ones
        all_of_them.turns += found.turns
        all_of_them.parts += found.parts
        all_of_them.server = found.server
    page = (
        "# Benchmarks\n\nMade by `make bench` "
        f"({options.processes} pairs of processes, {options.turns} turns in each, three times as "
        "many for one request; medians;\nratios are medians within a turn). CPU time of the whole "
        f"process.\nMachine: {machine()}.\n\n{table(all_of_them.ones, all_of_them.turns)}\n\n"
        f"## Where the time goes\n\n{len(REQUESTS)} requests as above, with a timer around each "
        "part (which costs about a microsecond a call); without what a\npart calls of another. "
        f"What was tried against each: [experiments.md](experiments.md).\n\n"
        f"{parts_table(all_of_them.parts, all_of_them.server)}\n"
    )
    print(page)
    if options.output:
        options.output.write_text(page)


if __name__ == "__main__":
    with_one_heap()
    main()
