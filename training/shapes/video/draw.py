"""Captions and videos of one coloured shape that moves.

`caption` and `parse` convert a `MovingShape` to words and back; `draw` makes its frames. Colours,
shapes, brush and styles of captions are the picture model's.

This module needs only Pillow, no tensors.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from PIL import Image

from training.shapes.draw import (
    CANONICAL,
    CaptionStyle,
    Item,
    background_clause,
    noun,
    random_style,
    render,
    split_caption,
)

SIZE_PX = 48
FRAMES = 9
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
BACKGROUNDS = ("black", "white", "blue")
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS: dict[str, tuple[int, int]] = {  # x to the right, y downwards
    "right": (1, 0),
    "left": (-1, 0),
    "up": (0, -1),
    "down": (0, 1),
}


@dataclass(frozen=True, slots=True)
class MovingShape:
    """The content of a video."""

    colour: str
    shape: str
    direction: str
    background: str | None  # None: any colour except the shape's


def caption(scene: MovingShape, style: CaptionStyle = CANONICAL) -> str:
    """Describe a video in words."""
    words = f"{noun(scene.colour, scene.shape, style)} moving {scene.direction}"
    return words + background_clause(scene.background, style)


def parse(text: str) -> MovingShape:
    """Read a caption, in any style.

    Raises:
        ValueError: the text is not a caption of one known shape that moves.
    """
    subject, background = split_caption(text)
    match subject.split():
        case [colour, shape, "moving", direction] if (
            colour in COLOURS
            and shape in SHAPES
            and direction in DIRECTIONS
            and background in ("", *BACKGROUNDS)
        ):
            return MovingShape(colour, shape, direction, background or None)
    raise ValueError(
        f"{text!r} is no caption of a moving shape: say 'a red circle moving right on a blue"
        " background'"
    )


def combinations() -> Iterator[MovingShape]:
    """List all possible videos, in a fixed order."""
    for parts in product(COLOURS, SHAPES, DIRECTIONS, BACKGROUNDS):
        if parts[0] != parts[-1]:
            yield MovingShape(*parts)


def is_held_out(scene: MovingShape) -> bool:
    """Return whether this combination is held out: one in five, as in a Latin square.

    Training includes any three of its four parts together, but never all four.
    """
    assert scene.background is not None
    places = (
        COLOURS.index(scene.colour),
        SHAPES.index(scene.shape),
        tuple(DIRECTIONS).index(scene.direction),
        BACKGROUNDS.index(scene.background),
    )
    return sum(places) % 5 == 0


def prompts(count: int, held_out: bool = True, seed: int = 0) -> list[str]:
    """Choose canonical captions, all different.

    Args:
        held_out: choose among the held-out combinations, otherwise the training ones.
    """
    pool = [caption(scene) for scene in combinations() if is_held_out(scene) is held_out]
    return random.Random(seed).sample(pool, count)


def draw(scene: MovingShape, rng: random.Random) -> list[Image.Image]:
    """Draw a video with small random variations of size, position and path.

    Returns:
        `FRAMES` anti-aliased RGB pictures, `SIZE_PX` square. The shape moves through the
        centre at constant speed, about 22 pixels in total, and never touches the
        border.
    """
    background = scene.background or rng.choice([c for c in BACKGROUNDS if c != scene.colour])
    item = Item(scene.colour, scene.shape)
    right, down = DIRECTIONS[scene.direction]
    r, way = rng.uniform(9.5, 10.5), rng.uniform(21, 23)
    late, aside = rng.uniform(-0.5, 0.5), rng.uniform(-2, 2)
    frames = []
    for frame in range(FRAMES):
        gone = way * (frame / (FRAMES - 1) - 0.5) + late  # offset from the middle
        cx = SIZE_PX / 2 + right * gone + abs(down) * aside
        cy = SIZE_PX / 2 + down * gone + abs(right) * aside
        frames.append(render(SIZE_PX, background, [(item, cx, cy, r)]))
    return frames


def sample(rng: random.Random) -> tuple[MovingShape, str]:
    """Choose a training video and its caption, mostly canonical.

    The caption may omit the background; the `MovingShape` always has it.
    """
    while True:
        choices = (COLOURS, SHAPES, tuple(DIRECTIONS), BACKGROUNDS)
        scene = MovingShape(*(rng.choice(parts) for parts in choices))
        if scene.colour != scene.background and not is_held_out(scene):
            return scene, caption(scene, random_style(rng))
