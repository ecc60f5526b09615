"""Judge the model in the package, loaded like any other checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from training.shapes.draw import SIZE_PX, prompts
from training.shapes.judge import why_not
from training.shapes.text import Log

PER_KIND = 100  # prompts of one shape, and again of two
BATCH_ROWS = 25


def evaluate(folder: Path, log: Log) -> tuple[float, float]:
    """Judge pictures of the held-out prompts, and log how many are right.

    Seeds are 0, 1, 2 ... in the order of the prompts. The settings are the pipeline's
    own with what `carpool.json` lays under them; others are judged for comparison.

    Returns:
        The shares of one-shape and two-shape pictures that are right by default.
    """
    pipeline = load(folder)
    captions = prompts(PER_KIND)
    wrong = [
        why_not(*pair) for pair in zip(pictures(pipeline, folder, captions), captions, strict=True)
    ]
    default = shares(wrong)
    log(f"{len(captions)} held-out prompts, default settings: {describe(default)}")
    for at, reason in enumerate(wrong):
        if reason:
            log(f"  wrong, seed {at}: {captions[at]!r}: {reason}")
    others: list[dict[str, float]] = [{"guidance_scale": g} for g in (1.0, 2.0, 5.0)]
    others += [{"num_inference_steps": n} for n in (4, 8, 16)]
    for settings in others:
        images = pictures(pipeline, folder, captions, **settings)
        found = shares([why_not(*pair) for pair in zip(images, captions, strict=True)])
        (name, value), *_ = settings.items()
        log(f"the same with {name} {value}: {describe(found)}")
    return default


def load(folder: Path) -> DiffusionPipeline:
    """Load the model for the CPU, in single precision."""
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pictures(
    pipeline: DiffusionPipeline, folder: Path, captions: Sequence[str], **settings: float
) -> list[Image.Image]:
    """Draw one picture of each caption; its seed is its place."""
    settings = json.loads((folder / "carpool.json").read_text())["defaults"] | settings
    images: list[Image.Image] = []
    for start in range(0, len(captions), BATCH_ROWS):
        batch = list(captions[start : start + BATCH_ROWS])
        seeds = [torch.Generator().manual_seed(start + at) for at in range(len(batch))]
        images += pipeline(prompt=batch, generator=seeds, **settings).images
    return images


def shares(wrong: Sequence[str]) -> tuple[float, float]:
    """Give the shares of right pictures, for a list with one-shape prompts first."""
    half = len(wrong) // 2
    return wrong[:half].count("") / half, wrong[half:].count("") / half


def describe(found: tuple[float, float]) -> str:
    """Put the two shares into words."""
    return f"one shape {found[0]:.1%} right, two shapes {found[1]:.1%} right"


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
    """Break a text into lines of at most a width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if canvas.textlength(longer) <= width_px:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)
