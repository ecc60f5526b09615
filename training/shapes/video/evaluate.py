"""Judge the video model in the package, loaded like any other checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from training.shapes.text import Log
from training.shapes.video.draw import FRAMES, SIZE_PX, prompts
from training.shapes.video.judge import why_not

HELD_OUT, SEEDS = 50, 2  # prompts, and videos of each
BATCH_ROWS = 24
Video = list[Image.Image]


def evaluate(folder: Path, log: Log) -> float:
    """Judge videos of the held-out prompts, `SEEDS` of each, and log how many are right.

    Seeds are 0, 1, 2 ... in the order of the videos. The settings are those of
    `carpool.json`; others are judged for comparison.

    Returns:
        The share of videos that are right by default, in all that their prompts say.
    """
    pipeline = load(folder)
    captions = prompts(HELD_OUT) * SEEDS
    wrong = reasons(videos(pipeline, folder, captions), captions)
    share = wrong.count("") / len(wrong)
    log(f"{len(wrong)} videos of {HELD_OUT} held-out prompts, default settings: {share:.1%} right")
    for at, reason in enumerate(wrong):
        if reason:
            log(f"  wrong, seed {at}: {captions[at]!r}: {reason}")
    others: list[dict[str, float]] = [{"guidance_scale": g} for g in (1.0, 2.0, 5.0)]
    others += [{"num_inference_steps": n} for n in (6, 8, 24)]
    for settings in others:
        found = reasons(videos(pipeline, folder, captions, **settings), captions)
        (name, value), *_ = settings.items()
        log(f"the same with {name} {value}: {found.count('') / len(found):.1%} right")
    return share


def load(folder: Path) -> DiffusionPipeline:
    """Load the model for the CPU, in single precision."""
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def videos(
    pipeline: DiffusionPipeline, folder: Path, captions: Sequence[str], **settings: float
) -> list[Video]:
    """Make one video of each caption, with the card's defaults; its seed is its place."""
    settings = json.loads((folder / "carpool.json").read_text())["defaults"] | settings
    made: list[Video] = []
    for start in range(0, len(captions), BATCH_ROWS):
        batch = list(captions[start : start + BATCH_ROWS])
        seeds = [torch.Generator().manual_seed(start + at) for at in range(len(batch))]
        made += pipeline(prompt=batch, generator=seeds, output_type="pil", **settings).frames
    return made


def reasons(made: Sequence[Video], captions: Sequence[str]) -> list[str]:
    """Say of each video why it is wrong; nothing where it is right."""
    return [why_not(*pair) for pair in zip(made, captions, strict=True)]


def sheet(made: Sequence[Video], captions: Sequence[str]) -> Image.Image:
    """Lay out videos, one below the other, frames in a row; wrong ones with the reason in red."""
    gap, text = 4, 18
    page = Image.new(
        "RGB", (FRAMES * (SIZE_PX + gap) + gap, len(made) * (SIZE_PX + text + 2 * gap)), "white"
    )
    canvas = ImageDraw.Draw(page)
    for at, (frames, caption) in enumerate(zip(made, captions, strict=True)):
        y = at * (SIZE_PX + text + 2 * gap) + gap
        canvas.text((gap, y), caption, fill="black")
        canvas.text((gap + canvas.textlength(caption + "  "), y), why_not(frames, caption), "red")
        for number, frame in enumerate(frames):
            page.paste(frame, (gap + number * (SIZE_PX + gap), y + text))
    return page
