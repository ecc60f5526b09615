"""Precision and cost of each numerics mode: single against batched requests, by model and type.

    python -m benchmarks.numerics [MODEL ...] [--append-to FILE]

Every request of a model runs alone, and then all run together; differences are of pixel values from
0 to 1. Milliseconds a request are CPU time of the process, so other work on the machine hardly
matters: medians of rounds in which the two modes alternate.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import numpy as np

import carpool
from carpool.settings.engine import Numerics

REQUESTS = 6
ROUNDS = 7
MODELS = ("shapes",)
MODES: tuple[Numerics, ...] = get_args(Numerics)
HEADER = """| model | type | numerics | largest difference | one by one, ms a request | together, \
ms a request | price of exact |
| --- | --- | --- | --- | --- | --- | --- |"""


def row(model: str, dtype: str) -> list[str]:
    """Lines of one model and type: the two modes alternate."""
    requests = [
        carpool.Request(f"{n} red circle", seed=n, num_inference_steps=4 + n % 3, output_type="np")
        for n in range(REQUESTS)
    ]
    gaps = dict.fromkeys(MODES, 0.0)
    seconds: dict[Numerics, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(carpool.load(model, device="cpu", dtype=dtype, numerics=mode))
            for mode in MODES
        }
        for i in range(-3, ROUNDS):  # rounds below 0: warm-up and proofs
            for mode, engine in engines.items():
                gap, *took = one_round(engine, requests)
                if i >= 0:
                    gaps[mode] = max(gaps[mode], gap)
                    seconds[mode].append((took[0], took[1]))
    price = statistics.median(
        exact / fast
        for (_, exact), (_, fast) in zip(seconds["exact"], seconds["fast"], strict=True)
    )
    lines = []
    for mode in MODES:
        alone, together = (
            f"{statistics.median(column) / REQUESTS * 1e3:.0f}"
            for column in zip(*seconds[mode], strict=True)
        )
        times = f"{price:.2f}x fast" if mode == "exact" else ""
        lines.append(
            f"| {model} | {dtype} | {mode} | {gaps[mode]:.1e} | {alone} | {together} | {times} |"
        )
    return lines


def one_round(
    engine: carpool.Engine, requests: Sequence[carpool.Request]
) -> tuple[float, float, float]:
    """The largest difference; seconds of all requests in sequence, and together."""
    began_s = time.process_time()
    alone = [pixels(engine.generate([request])[0]) for request in requests]
    between_s = time.process_time()
    together = [pixels(output) for output in engine.generate(requests)]
    ended_s = time.process_time()
    pairs = zip(alone, together, strict=True)
    gap = max(float(np.abs(a - b).max()) for a, b in pairs)
    return gap, between_s - began_s, ended_s - between_s


def pixels(output: Any) -> Any:
    return np.asarray(output.frames if output.frames is not None else output.images, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--append-to", type=Path, help="also append the table to this file")
    options = parser.parse_args()
    lines = [HEADER]
    for model in options.models:
        for dtype in ("float32", "bfloat16"):
            lines += row(model, dtype)
    table = "\n".join(lines)
    print(table)
    if options.append_to:
        with options.append_to.open("a") as file:
            file.write(
                f"\n## Numerics\n\nMade by `python -m benchmarks.numerics`; see "
                f"[numerics](numerics.md).\n\n{table}\n"
            )


if __name__ == "__main__":
    main()
