"""Recognise the content of a video from the content and positions in its frames.

Each frame is judged like a picture. A video is clear if nearly all frames show the same
shape on the same background, no frame differs, and the shape moves in one direction.

The thresholds were set on drawn videos with noise and blur, before judging any model.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from training.shapes import draw as pictures
from training.shapes.judge import FOREGROUND_DISTANCE, Judgement, Unclear
from training.shapes.judge import judge as judge_picture
from training.shapes.video.draw import (
    DIRECTIONS,
    FRAMES,
    SHAPES,
    SIZE_PX,
    MovingShape,
    caption,
    parse,
)

MAX_UNCLEAR = 2  # most unclear frames
MIN_WAY_PX = 12.0  # from the first frame to the last
MAX_ASIDE = 0.25  # most sideways motion, relative to the path
MAX_BACK_PX = 1.0  # most backward motion between two frames
MAX_STEP = 0.35  # longest step between two frames, relative to the path

Frames = Sequence[Image.Image] | NDArray[np.uint8]
Pixels = NDArray[np.float64]


def judge(frames: Frames) -> Judgement[MovingShape]:
    """Recognise the content of a video.

    Args:
        frames: `FRAMES` RGB pictures, or bytes (FRAMES, SIZE_PX, SIZE_PX, 3).

    Raises:
        ValueError: the video has another length or size.
    """
    images = [f if isinstance(f, Image.Image) else Image.fromarray(f) for f in frames]
    if len(images) != FRAMES or any(image.size != (SIZE_PX, SIZE_PX) for image in images):
        sizes = " and ".join(sorted({f"{image.width}x{image.height}" for image in images}))
        raise ValueError(
            f"a video of {len(images)} frames of {sizes or 'no size'} cannot be judged: give"
            f" {FRAMES} of {SIZE_PX}x{SIZE_PX}"
        )
    try:
        scene = _scene(images)
        (item,), background = scene.items, scene.background
        assert background is not None
        places = np.array([_place(image, background) for image in images])
        return Judgement(MovingShape(item.colour, item.shape, _direction(places), background))
    except Unclear as unclear:
        return Judgement(None, str(unclear))


def why_not(frames: Frames, expected: MovingShape | str) -> str:
    """Explain why a video does not match the expected content or caption.

    Returns:
        An empty string if the video is right.
    """
    scene = parse(expected) if isinstance(expected, str) else expected
    return judge(frames).why_not(scene, caption)


def shows(frames: Frames, expected: MovingShape | str) -> bool:
    """Return whether a video matches this content or a caption."""
    return not why_not(frames, expected)


def _scene(images: list[Image.Image]) -> pictures.Scene:
    """Recognise the common content of all frames."""
    size = (pictures.SIZE_PX, pictures.SIZE_PX)
    judged = [judge_picture(image.resize(size, Image.Resampling.BICUBIC)) for image in images]
    unclear = [(at, judgement.reason) for at, judgement in enumerate(judged) if not judgement.shown]
    if len(unclear) > MAX_UNCLEAR:
        at, reason = unclear[0]
        raise Unclear(f"has {len(unclear)} unclear frames; frame {at} {reason}")
    scenes = [judgement.shown for judgement in judged if judgement.shown]
    for scene in scenes:
        if scene != scenes[0]:
            first, second = pictures.caption(scenes[0]), pictures.caption(scene)
            raise Unclear(f"shows {first}, and also {second}")
    if len(scenes[0].items) != 1 or scenes[0].items[0].shape not in SHAPES:
        raise Unclear(f"shows {pictures.caption(scenes[0])}")
    return scenes[0]


def _place(image: Image.Image, background: str) -> tuple[float, float]:
    """The centre of the foreground, in pixels from the left and the top."""
    rgb = np.asarray(image.convert("RGB"), dtype=np.float64)
    away: Pixels = np.linalg.norm(rgb - np.array(pictures.PALETTE[background]), axis=-1)
    rows, columns = np.nonzero(away > FOREGROUND_DISTANCE)
    if not len(rows):
        raise Unclear("has an empty frame")
    return float(columns.mean()), float(rows.mean())


def _direction(places: Pixels) -> str:
    """Name the direction of a shape's motion.

    Args:
        places: positions (FRAMES, 2), pixels to the right and downwards.
    """
    shift = places[-1] - places[0]
    along = int(np.abs(shift).argmax())
    way = float(abs(shift[along]))
    if way < MIN_WAY_PX:
        raise Unclear(f"moves by only {way:.1f} pixels")
    forward = np.diff(places[:, along]) * np.sign(shift[along])
    if forward.min() < -MAX_BACK_PX:
        raise Unclear(f"moves back by {-forward.min():.1f} pixels")
    if forward.max() > MAX_STEP * way:
        raise Unclear(f"jumps by {forward.max():.1f} of {way:.1f} pixels")
    aside = float(np.ptp(places[:, 1 - along]))
    if aside > MAX_ASIDE * way:
        raise Unclear(f"moves {aside:.1f} pixels aside, on {way:.1f}")
    vector = [0, 0]
    vector[along] = int(np.sign(shift[along]))
    return next(name for name, step in DIRECTIONS.items() if list(step) == vector)
