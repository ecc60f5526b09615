"""The engine against plain diffusers, on this CPU, with the embedded model: one table.

usage: make bench       (or: OMP_NUM_THREADS=1 python benchmarks/cpu.py [--output docs/...])

Everything is measured in this one process, by turns, several times; the table shows medians, and
ratios are medians of the ratios within a turn, so that they hold when the machine's speed drifts.
The *ceiling* of a run is the same forwards, with the same inputs at the same widths, without any
pipeline or engine around them: what an engine that costs nothing could reach.
"""

import argparse
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

import carpool
from carpool.models.embedded import MODEL_DIR

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
HEAVY = {"text_encoder": "forward", "text_encoder_2": "forward", "transformer": "forward",
         "vae": "decode"}  # fmt: skip


class Recorder:
    """Keeps every heavy call that reaches a pipeline's modules, to run it again bare."""

    def __init__(self, pipe: Any) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        for component, method in HEAVY.items():
            module = getattr(pipe, component)
            module.__dict__[method] = self._recorded(getattr(module, method))

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # keeps the signature, by which the engine knows arguments
        def method(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((original, args, kwargs))
            return original(*args, **kwargs)

        return method

    @torch.no_grad()
    def bare_s(self) -> float:
        """Run what was recorded and nothing else; forgets it."""
        calls, self.calls = self.calls, []
        began_s = time.perf_counter()
        for original, args, kwargs in calls:
            original(*args, **kwargs)
        return time.perf_counter() - began_s


def plain(pipe: Any, requests: Sequence[carpool.Request]) -> None:
    """The same requests with nothing but diffusers, one after another."""
    for request in requests:
        generator = torch.Generator().manual_seed(request.seed or 0)
        pipe(request.prompt, **DEFAULTS, **request.parameters, generator=generator,
             output_type="pil")  # fmt: skip


def timed(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def one_turn(bare: Any, engine: carpool.Engine) -> dict[str, float]:
    """One request, each way."""
    single = [carpool.Request(PROMPTS[0], seed=1)]
    return {
        "one plain": timed(lambda: plain(bare, single)),
        "one engine": timed(lambda: engine.generate(single, **DEFAULTS)),
    }


@dataclass(frozen=True, slots=True)
class Recorded:
    """An engine whose forwards are kept. Never timed: what it keeps costs it time."""

    engine: carpool.Engine
    recorder: Recorder

    @classmethod
    def load(cls) -> "Recorded":
        pipe = DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
        recorder = Recorder(pipe)
        return cls(carpool.load(pipe), recorder)


def turn(
    bare: Any, engine: carpool.Engine, off: carpool.Engine, recorded: Recorded
) -> dict[str, float]:
    """Sixteen requests, each way."""
    found: dict[str, float] = {}
    before = engine.statistics()
    found["engine"] = timed(lambda: engine.generate(REQUESTS, **DEFAULTS))
    after = engine.statistics()
    recorded.engine.generate(REQUESTS, **DEFAULTS)
    found["forwards"] = len(recorded.recorder.calls)
    found["ceiling"] = recorded.recorder.bare_s()
    spent = {name: after[name] - before[name] for name in ("turn_s", "forward_s", "fiber_s")}
    found["loop"] = spent["turn_s"] - spent["forward_s"] - spent["fiber_s"]
    found["fibers"] = spent["fiber_s"]
    found["off"] = timed(lambda: off.generate(REQUESTS, **DEFAULTS))
    found["plain"] = timed(lambda: plain(bare, REQUESTS))
    return found


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
    forwards = median("forwards")
    rows = [
        ("one request, 28 steps: plain diffusers", f"{median('one plain') * 1e3:.0f} ms", ""),
        ("one request, 28 steps: engine", f"{median('one engine') * 1e3:.0f} ms",
         f"{ratio('one plain', 'one engine'):.2f}x the speed of plain diffusers (goal 0.97)"),
        (f"{n} requests, 8-36 steps: plain diffusers in sequence", f"{median('plain'):.2f} s", ""),
        (f"{n} requests: engine, `off`", f"{median('off'):.2f} s",
         f"{ratio('plain', 'off'):.2f}x plain diffusers"),
        (f"{n} requests: engine, `continuous`", f"{median('engine'):.2f} s",
         f"{ratio('plain', 'engine'):.2f}x plain diffusers, {ratio('off', 'engine'):.2f}x `off`"),
        (f"the same {forwards:.0f} forwards bare (the ceiling)", f"{median('ceiling'):.2f} s",
         f"engine reaches {ratio('ceiling', 'engine'):.2f} of it (goal 0.90); the ceiling is "
         f"{ratio('plain', 'ceiling'):.2f}x plain diffusers"),
        ("the loop's own time a forward", f"{median('loop') / forwards * 1e6:.0f} us", ""),
        ("the loop's own time a request", f"{median('loop') / n * 1e6:.0f} us",
         f"beside {median('fibers') / n * 1e3:.1f} ms in the pipeline's own code"),
    ]  # fmt: skip
    lines = ["| what | median | side by side |", "| --- | ---: | --- |"]
    return "\n".join([*lines, *(f"| {a} | {b} | {c} |" for a, b, c in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the page here as well")
    options = parser.parse_args()
    bare = DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    bare.set_progress_bar_config(disable=True)
    engine = carpool.load("shapes")
    ones = [one_turn(bare, engine) for _ in range(3 * options.turns + 2)][2:]  # two to warm up
    off, recorded = carpool.load("shapes", batching_mode="off"), Recorded.load()
    turns = []
    for i in range(options.turns + 1):
        print(f"turn {i} of {options.turns}", file=sys.stderr)
        turns.append(turn(bare, engine, off, recorded))
    turns = turns[1:]  # the first warms up
    for one in (engine, off, recorded.engine):
        one.close()
    page = (
        "# Benchmarks\n\nMade by `make bench` "
        f"({options.turns} turns, three times as many for one request; medians; ratios are\n"
        "medians within a turn).\n"
        f"Machine: {machine()}.\n\n{table(ones, turns)}\n"
    )
    print(page)
    if options.output:
        options.output.write_text(page)


if __name__ == "__main__":
    main()
