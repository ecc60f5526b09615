"""Skipped steps on the embedded models: saved forwards, right pictures, throughput.

usage: make bench-step-cache    (or: OMP_NUM_THREADS=1 python -m benchmarks.step_cache)

Held-out prompts with mixed steps and guidance, sixteen at a time. Every round runs sixteen prompts
through all thresholds in sequence, so ratios within a round are robust when the machine's speed
drifts. The measure is CPU time of the process; the judge of `training/` decides what is right.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import carpool
import training.shapes.judge as pictures
import training.shapes.video.judge as videos
from proof.page import machine, table
from training.shapes.draw import prompts as picture_prompts
from training.shapes.video.draw import prompts as video_prompts

THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
CLIENTS = 16
STEPS = (12, 16, 20, 24, 28, 32, 36)
HEAD = """# Skipped steps

`step_cache` in a request (or `--step-cache`, or the header `x-step-cache`) skips steps whose
predicted change is below a threshold. `make bench-step-cache` writes this page: {rounds} rounds of
16 held-out prompts per model, 16 at a time, {steps} steps and mixed guidance, on
{machine}. *Fewer forwards* is all steps over steps that ran; *right*, pictures that a program
accepts; *done*, requests per CPU second, relative to no skipping (median of rounds).
"""


@dataclass(slots=True)
class Seen:
    """The results of one threshold over all rounds."""

    right: list[bool] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0
    cpu_s: list[float] = field(default_factory=list)  # CPU seconds by round


def play(
    model: str, captions: Sequence[str], is_right: Callable[[carpool.Output, str], bool]
) -> dict[float, Seen]:
    """Run all captions through all thresholds, in rounds of `CLIENTS`."""
    results = {threshold: Seen() for threshold in THRESHOLDS}
    with (
        tempfile.TemporaryDirectory() as made_here,
        carpool.load(model, max_running=CLIENTS, cost_table=f"{made_here}/costs.json") as engine,
    ):
        engine.generate(requests(captions[:CLIENTS], 0, 0.0))  # warm-up of every width
        for start in range(0, len(captions), CLIENTS):
            batch = captions[start : start + CLIENTS]
            for threshold, result in results.items():
                jobs = requests(batch, start, threshold)
                began_s = time.process_time()
                outputs = engine.generate(jobs)
                result.cpu_s.append(time.process_time() - began_s)
                result.steps += sum(request.parameters["num_inference_steps"] for request in jobs)
                result.skipped += sum(output.skipped_steps for output in outputs)
                result.right += [is_right(*pair) for pair in zip(outputs, batch, strict=True)]
    return results


def requests(captions: Sequence[str], start: int, threshold: float) -> list[carpool.Request]:
    return [
        carpool.Request(
            caption, seed=start + at, num_inference_steps=STEPS[at % len(STEPS)],
            guidance_scale=2.0 + at % 3, step_cache=threshold, output_type="pil",
        )
        for at, caption in enumerate(captions)
    ]  # fmt: skip


def summary(results: dict[float, Seen]) -> str:
    rows = []
    for threshold, result in results.items():
        ratio = result.steps / (result.steps - result.skipped)
        share = 100 * sum(result.right) / len(result.right)
        pairs = zip(results[0.0].cpu_s, result.cpu_s, strict=True)
        speedup = statistics.median(plain / carpool_s for plain, carpool_s in pairs)
        rows.append([f"{threshold:g}", f"{ratio:.2f}x", f"{share:.1f} %", f"{speedup:.2f}x"])
    return table(["`step_cache`", "fewer forwards", "right", "done"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)  # 55 captions of clips are held out
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    count = options.rounds * CLIENTS
    parts = [HEAD.format(rounds=options.rounds, steps=f"{STEPS[0]} to {STEPS[-1]}",
                         machine=f"one thread of {machine()}")]  # fmt: skip

    def picture(output: Any, caption: str) -> bool:
        return pictures.shows(output.images[0], caption)

    def video(output: Any, caption: str) -> bool:
        return videos.shows(output.frames[0], caption)

    for model, captions, is_right in (
        ("shapes", picture_prompts(-(-count // 2))[:count], picture),
        ("shapes-video", video_prompts(count), video),
    ):
        parts += [f"## `{model}`", "", summary(play(model, captions, is_right)), ""]
        print("\n".join(parts[-3:]), flush=True)
    if options.output:
        options.output.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
