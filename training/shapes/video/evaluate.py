"""Judge the packaged video model, loaded like any other checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from training.shapes.evaluate import compare_settings, generate
from training.shapes.fit import Log
from training.shapes.video.draw import FRAMES, SIZE_PX, prompts
from training.shapes.video.judge import why_not

HELD_OUT, SEEDS = 50, 2  # prompts, videos per prompt
BATCH_ROWS = 24
Video = list[Image.Image]


def evaluate(folder: Path, log: Log) -> None:
    """Judge `SEEDS` videos of each held-out prompt, and log the share of right ones."""
    captions = prompts(HELD_OUT) * SEEDS
    compare_settings(
        folder, captions, (6, 8, 24), log,
        heading=f"{len(captions)} videos of {HELD_OUT} held-out prompts, default settings",
        why_not=why_not, describe=describe, batch_rows=BATCH_ROWS,
    )  # fmt: skip


def describe(wrong: Sequence[str]) -> str:
    """Summarise the share of videos that match their prompts completely."""
    return f"{wrong.count('') / len(wrong):.1%} right"


def videos(pipeline: DiffusionPipeline, folder: Path, captions: Sequence[str]) -> list[Video]:
    """Make one video for each caption, with the card's defaults; its seed is its index."""
    return generate(pipeline, folder, captions, BATCH_ROWS)


def reasons(clips: Sequence[Video], captions: Sequence[str]) -> list[str]:
    """The judge's reason for each video; empty if right."""
    return [why_not(*pair) for pair in zip(clips, captions, strict=True)]


def sheet(clips: Sequence[Video], captions: Sequence[str]) -> Image.Image:
    """Lay out videos in rows of frames; wrong ones with the reason in red."""
    gap, text = 4, 18
    page = Image.new(
        "RGB", (FRAMES * (SIZE_PX + gap) + gap, len(clips) * (SIZE_PX + text + 2 * gap)), "white"
    )
    canvas = ImageDraw.Draw(page)
    for at, (frames, caption) in enumerate(zip(clips, captions, strict=True)):
        y = at * (SIZE_PX + text + 2 * gap) + gap
        canvas.text((gap, y), caption, fill="black")
        canvas.text((gap + canvas.textlength(caption + "  "), y), why_not(frames, caption), "red")
        for number, frame in enumerate(frames):
            page.paste(frame, (gap + number * (SIZE_PX + gap), y + text))
    return page
