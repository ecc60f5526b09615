"""The video model draws what held-out prompts say, and its judge is not easily pleased."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw, ImageFilter

import carpool
from carpool.models.embedded import VIDEO_MODEL_DIR
from training.shapes.draw import PALETTE, CaptionStyle
from training.shapes.evaluate import load
from training.shapes.video.draw import (
    FRAMES,
    SIZE_PX,
    MovingShape,
    caption,
    combinations,
    draw,
    is_held_out,
    parse,
    prompts,
    sample,
)
from training.shapes.video.evaluate import HELD_OUT, reasons, videos
from training.shapes.video.judge import judge, shows, why_not

RED_CIRCLE = parse("a red circle moving right on a blue background")
Video = list[Image.Image]


def noisy(frames: Video, rng: np.random.Generator) -> Video:
    """Add grain of 8 levels."""
    grain = rng.normal(0, 8, (FRAMES, SIZE_PX, SIZE_PX, 3))
    damaged = np.clip(np.stack([np.asarray(frame) for frame in frames]) + grain, 0, 255)
    return [Image.fromarray(frame) for frame in damaged.astype(np.uint8)]


def blurred(frames: Video) -> Video:
    """Soften by 0.6 pixels."""
    return [frame.filter(ImageFilter.GaussianBlur(0.6)) for frame in frames]


@pytest.mark.parametrize("damage", ["none", "grain", "blur"])
def test_drawn_videos_are_right(damage: str) -> None:
    rng, grain = random.Random(1), np.random.default_rng(1)
    asked = rng.sample(list(combinations()), 60)
    made = [draw(clip, rng) for clip in asked]
    if damage == "grain":
        made = [noisy(frames, grain) for frames in made]
    if damage == "blur":
        made = [blurred(frames) for frames in made]

    right = [shows(frames, clip) for frames, clip in zip(made, asked, strict=True)]

    assert sum(right) >= 59


@pytest.mark.parametrize(
    "shown",
    [
        "a red circle moving left on a blue background",
        "a red circle moving up on a blue background",
        "a red circle moving down on a blue background",
        "a red square moving right on a blue background",
        "an orange circle moving right on a blue background",
        "a red circle moving right on a black background",
    ],
)
def test_a_video_that_differs_in_anything_is_refused_and_named(shown: str) -> None:
    frames = draw(parse(shown), random.Random(2))

    assert why_not(frames, RED_CIRCLE) == f"shows {shown}"


def diagonal(frames: Video) -> Video:
    pixels = (np.roll(np.asarray(one), 2 * at - 8, axis=0) for at, one in enumerate(frames))
    return [Image.fromarray(one) for one in pixels]


def turning_green(frames: Video) -> Video:
    green = parse("a green circle moving right on a blue background")
    return frames[:5] + draw(green, random.Random(7))[5:]


BROKEN: dict[str, tuple[Callable[[Video], Video], str]] = {
    "backwards": (lambda frames: frames[::-1], "^shows a red circle moving left on a blue"),
    "a still picture": (lambda frames: frames[4:5] * FRAMES, "^moves by only 0.0 pixels$"),
    "out of order": (
        lambda frames: [frames[at] for at in (0, 1, 2, 5, 4, 3, 6, 7, 8)], "^moves back by ",
    ),
    "a jump": (lambda frames: frames[:1] * 5 + frames[-1:] * 4, "^jumps by "),
    "diagonal": (diagonal, " pixels aside"),
    "of two colours": (turning_green, "and also a green circle on a blue background$"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_video_that_moves_or_looks_otherwise_is_refused_with_the_reason(
    change: Callable[[Video], Video], reason: str
) -> None:
    frames = change(draw(RED_CIRCLE, random.Random(7)))

    assert re.search(reason, why_not(frames, RED_CIRCLE))


def test_two_unclear_frames_are_forgiven_and_three_are_not() -> None:
    frames = draw(RED_CIRCLE, random.Random(8))
    for at in (2, 4, 6):
        assert shows(frames, RED_CIRCLE)
        ImageDraw.Draw(frames[at]).rectangle((0, 22, 48, 26), fill=PALETTE["yellow"])

    assert why_not(frames, RED_CIRCLE).startswith("has 3 unclear frames; frame 2 ")


def test_noise_shows_nothing() -> None:
    grain = np.random.default_rng(0).integers(0, 256, (FRAMES, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)

    assert judge(grain).shown is None


def test_a_video_of_another_size_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="8 frames of 64x64 cannot be judged: give 9 of 48x48"):
        judge([Image.new("RGB", (64, 64))] * 8)


def test_captions_in_any_style_are_read_back() -> None:
    rng = random.Random(9)
    for _ in range(300):
        clip, text = sample(rng)
        stated = parse(text)
        assert stated.background in (None, clip.background)
        assert stated == MovingShape(clip.colour, clip.shape, clip.direction, stated.background)


def test_a_caption_is_plain_english() -> None:
    clip = MovingShape("orange", "cross", "up", "white")

    assert caption(clip) == "an orange cross moving up on a white background"
    assert caption(clip, CaptionStyle(background_clause=False)) == "an orange cross moving up"


@pytest.mark.parametrize(
    "text", ["", "a cat", "a red circle on a blue background", "a red star moving up", "a red"]
)
def test_other_text_is_no_caption(text: str) -> None:
    with pytest.raises(ValueError, match="is no caption of a moving shape"):
        parse(text)


def test_held_out_combinations_are_never_trained_on() -> None:
    rng = random.Random(11)

    assert not any(is_held_out(sample(rng)[0]) for _ in range(500))
    assert all(is_held_out(parse(text)) for text in prompts(HELD_OUT))
    assert len(set(prompts(HELD_OUT))) == HELD_OUT >= 50
    assert len(list(combinations())) == (6 * 3 - 1) * 4 * 4  # blue on blue is none


def test_plain_diffusers_loads_it_as_a_wan() -> None:
    pipe = DiffusionPipeline.from_pretrained(VIDEO_MODEL_DIR)
    defaults = json.loads((VIDEO_MODEL_DIR / "carpool.json").read_text())["defaults"]

    assert type(pipe).__name__ == "WanPipeline"
    assert (pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial) == (4, 8)
    assert defaults["num_inference_steps"] <= 16


def test_held_out_prompts_become_what_they_say() -> None:
    captions = prompts(8)

    found = reasons(videos(load(VIDEO_MODEL_DIR), VIDEO_MODEL_DIR, captions), captions)

    assert found.count("") >= 6, found


@pytest.mark.usefixtures("fusing_is_free")
def test_clips_of_all_lengths_of_steps_ride_together_and_come_out_as_if_alone() -> None:
    asked = [
        carpool.Request(text, seed=seed, num_inference_steps=8 + seed, guidance_scale=2.5 + seed)
        for seed, text in enumerate(prompts(4, held_out=False))
    ]
    pipe = load(VIDEO_MODEL_DIR)
    defaults = json.loads((VIDEO_MODEL_DIR / "carpool.json").read_text())["defaults"]

    with carpool.load("shapes-video") as engine:
        together = engine.generate(asked, output_type="pt")
        forwards = engine.statistics()["forwards"]

    for request, output in zip(asked, together, strict=True):
        chance = torch.Generator().manual_seed(request.seed or 0)
        given = {**defaults, **request.parameters, "output_type": "pt", "generator": chance}
        alone = pipe(request.prompt, **given).frames
        drawn: Any = output.frames
        assert (drawn - alone).abs().max() <= 1e-4
        frames = (drawn[0].permute(0, 2, 3, 1) * 255).round().byte().numpy()
        assert why_not(frames, request.prompt) == ""
    assert max(f["requests"] for f in forwards if f["component"] == "transformer") == 4
