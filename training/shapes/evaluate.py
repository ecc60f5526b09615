"""Judge the packaged model, loaded like any other checkpoint."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from training.shapes.draw import SIZE_PX, prompts
from training.shapes.fit import Log
from training.shapes.judge import why_not

PER_KIND = 100  # prompts with one shape, and prompts with two
BATCH_ROWS = 25


def evaluate(folder: Path, log: Log) -> None:
    """Judge pictures of the held-out prompts, and log the share of right ones."""
    captions = prompts(PER_KIND)
    compare_settings(
        folder, captions, (4, 8, 16), log,
        heading=f"{len(captions)} held-out prompts, default settings",
        why_not=why_not, describe=describe,
    )  # fmt: skip


def compare_settings(
    folder: Path,
    captions: Sequence[str],
    step_counts: Sequence[int],
    log: Log,
    *,
    heading: str,
    why_not: Callable[[Any, str], str],
    describe: Callable[[Sequence[str]], str],
    batch_rows: int = BATCH_ROWS,
) -> None:
    """Judge a model's outputs for captions, with default and other settings.

    Seeds are 0, 1, 2 ... in the order of the captions. The default settings are the pipeline's
    defaults, overridden by `carpool.json`.

    Args:
        step_counts: numbers of steps to compare.
        why_not: the judge; returns an empty string for a right output.
        describe: summarises the judge's answers.
    """
    pipeline = load(folder)

    def reasons(**settings: float) -> list[str]:
        outputs = generate(pipeline, folder, captions, batch_rows, **settings)
        return [why_not(*pair) for pair in zip(outputs, captions, strict=True)]

    wrong = reasons()
    log(f"{heading}: {describe(wrong)}")
    for at, reason in enumerate(wrong):
        if reason:
            log(f"  wrong, seed {at}: {captions[at]!r}: {reason}")
    for guidance in (1.0, 2.0, 5.0):
        log(f"the same with guidance_scale {guidance}: "
            f"{describe(reasons(guidance_scale=guidance))}")  # fmt: skip
    for steps in step_counts:
        log(f"the same with num_inference_steps {steps}: "
            f"{describe(reasons(num_inference_steps=steps))}")  # fmt: skip


def load(folder: Path) -> DiffusionPipeline:
    """Load the model for the CPU, in single precision."""
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(
    pipeline: DiffusionPipeline,
    folder: Path,
    captions: Sequence[str],
    batch_rows: int = BATCH_ROWS,
    **settings: float,
) -> list[Any]:
    """Make one picture or video for each caption; its seed is its index."""
    settings = json.loads((folder / "carpool.json").read_text())["defaults"] | settings
    outputs: list[Any] = []
    for start in range(0, len(captions), batch_rows):
        batch = list(captions[start : start + batch_rows])
        seeds = [torch.Generator().manual_seed(start + at) for at in range(len(batch))]
        outputs += pipeline(prompt=batch, generator=seeds, output_type="pil", **settings)[0]
    return outputs


def describe(wrong: Sequence[str]) -> str:
    """Summarise the shares of right pictures, for a list with one-shape prompts first."""
    half = len(wrong) // 2
    single, double = wrong[:half].count("") / half, wrong[half:].count("") / half
    return f"one shape {single:.1%} right, two shapes {double:.1%} right"


def sheet(images: Sequence[Image.Image], captions: Sequence[str], columns: int = 8) -> Image.Image:
    """Lay out pictures with their captions, wrong ones with the judge's reason in red."""
    side, text = SIZE_PX * 2, 90
    rows = -(-len(images) // columns)
    page = Image.new("RGB", (columns * (side + 12), rows * (side + text)), "white")
    canvas = ImageDraw.Draw(page)
    for at, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = (at % columns) * (side + 12) + 6, (at // columns) * (side + text) + 6
        page.paste(image.resize((side, side), Image.Resampling.NEAREST), (x, y))
        reason = why_not(image, caption)
        label = wrap(caption, canvas, side + 8)
        canvas.text((x, y + side + 1), label, fill="black")
        if reason:
            below = y + side + 2 + 15 * (1 + label.count("\n"))
            canvas.text((x, below), wrap(reason, canvas, side + 8), fill="red")
    return page


def wrap(text: str, canvas: ImageDraw.ImageDraw, width_px: int) -> str:
    """Break a text into lines of limited width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if canvas.textlength(longer) <= width_px:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)
