"""The engine against plain diffusers, on this CPU, with the embedded model: two tables.

usage: make bench       (or: OMP_NUM_THREADS=1 python -m benchmarks.cpu [--output docs/...])

Everything is measured in this one process, by turns, several times. What counts is CPU time of the
whole process, all threads of the engine included: other work on the machine does not count as ours.
Tables show medians, and ratios are medians of the ratios within a turn, so that they hold when the
machine's speed drifts.

The *ceiling* of a run is the same forwards without any pipeline or engine around them: what an
engine that costs nothing could reach. They are those of the very burst that was measured: the
modules of the measured engine note the size of each call, and keep the arguments of the first call
of each size, and the bare run makes the same calls in the same order with these.

All threads share one heap: `with_one_heap`.
"""

import argparse
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

import carpool
from benchmarks.parts import FORWARDS, Parts, of_a_server
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


def plain(pipe: Any, requests: Sequence[carpool.Request]) -> None:
    """The same requests with nothing but diffusers, one after another."""
    for request in requests:
        generator = torch.Generator().manual_seed(request.seed or 0)
        pipe(request.prompt, **DEFAULTS, **request.parameters, generator=generator,
             output_type="pil")  # fmt: skip


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds of the process, all its threads."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def one_turn(bare: Any, engine: carpool.Engine) -> dict[str, float]:
    """One request, each way; who begins takes turns."""
    single = [carpool.Request(PROMPTS[0], seed=1)]
    return {
        "one plain": cpu_s(lambda: plain(bare, single)),
        "one engine": cpu_s(lambda: engine.generate(single, **DEFAULTS)),
    }


def turn(bare: Any, engine: carpool.Engine, off: carpool.Engine, log: ForwardLog) -> dict[str, Any]:
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
    found["plain"] = cpu_s(lambda: plain(bare, REQUESTS))
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
    lines = [
        "| part | ms a burst | share | us a forward | ms a request |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(row(name, seconds) for name, seconds in ordered),
        *(row(f"in a server: {name}", n * seconds) for name, seconds in server.items()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the page here as well")
    options = parser.parse_args()
    bare, mine = (DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32) for _ in "ab")
    bare.set_progress_bar_config(disable=True)
    parts = Parts()
    log = ForwardLog(mine, parts)
    engine, off = carpool.load(mine), carpool.load("shapes", batching_mode="off")
    ones = [one_turn(bare, engine) for _ in range(3 * options.turns + 2)][2:]  # two to warm up
    turns, seen = [], []
    for i in range(options.turns + 1):
        print(f"turn {i} of {options.turns}", file=sys.stderr)
        turns.append(turn(bare, engine, off, log))
        seen.append(parts_of(engine, log, parts))
    turns, seen = turns[1:], seen[1:]  # the first warms up
    [output] = engine.generate(REQUESTS[:1], **DEFAULTS)
    checked = check(engine.card, REQUESTS[0])
    server = of_a_server(output.images[0], checked, REQUESTS[0].parameters["num_inference_steps"])
    for one in (engine, off):
        one.close()
    page = (
        "# Benchmarks\n\nMade by `make bench` "
        f"({options.turns} turns, three times as many for one request; medians; ratios are\n"
        "medians within a turn). CPU time of the whole process.\n"
        f"Machine: {machine()}.\n\n{table(ones, turns)}\n\n"
        f"## Where the time goes\n\n{len(REQUESTS)} requests as above, with a timer around each "
        "part (which costs about a microsecond a call); without what a\npart calls of another. "
        f"What was tried against each: [experiments.md](experiments.md).\n\n"
        f"{parts_table(seen, server)}\n"
    )
    print(page)
    if options.output:
        options.output.write_text(page)


if __name__ == "__main__":
    with_one_heap()
    main()
