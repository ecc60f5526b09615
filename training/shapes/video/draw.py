"""Captions, clips and videos of one coloured shape that moves.

A *clip* is what a video shows. `caption` and `parse` turn clips into words and back;
`draw` makes the frames of one. Colours, shapes and brush are those of the pictures.

Only Pillow is needed here. Nothing knows about tensors or training.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from PIL import Image, ImageDraw

from training.shapes.draw import PALETTE, paint

SIZE_PX = 48
FRAMES = 9
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
BACKGROUNDS = ("black", "white", "blue")
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS: dict[str, tuple[int, int]] = {  # to the right, downwards
    "right": (1, 0),
    "left": (-1, 0),
    "up": (0, -1),
    "down": (0, 1),
}

_OVERSAMPLING = 4


@dataclass(frozen=True, slots=True)
class Clip:
    """What a video shows."""

    colour: str
    shape: str
    direction: str
    background: str | None  # None: any colour but the shape's


@dataclass(frozen=True, slots=True)
class Wording:
    """How a caption says it; the default is the canonical form."""

    articles: bool = True
    background_word: bool = True
    background_clause: bool = True


def caption(clip: Clip, wording: Wording = Wording()) -> str:
    """Say in words what a clip shows."""

    def noun(colour: str, thing: str) -> str:
        article = "an " if colour == "orange" else "a "
        return f"{article if wording.articles else ''}{colour} {thing}".rstrip()

    words = f"{noun(clip.colour, clip.shape)} moving {clip.direction}"
    if clip.background is None or not wording.background_clause:
        return words
    return f"{words} on {noun(clip.background, 'background' if wording.background_word else '')}"


def parse(text: str) -> Clip:
    """Read a caption, in any wording.

    Raises:
        ValueError: the text is not a caption of one known shape that moves.
    """
    words = [word for word in text.lower().split() if word not in ("a", "an", "background")]
    subject, _, background = " ".join(words).partition(" on ")
    match subject.split():
        case [colour, shape, "moving", direction] if (
            colour in COLOURS
            and shape in SHAPES
            and direction in DIRECTIONS
            and background in ("", *BACKGROUNDS)
        ):
            return Clip(colour, shape, direction, background or None)
    raise ValueError(
        f"{text!r} is no caption of a moving shape: say 'a red circle moving right on a blue"
        " background'"
    )


def clips() -> Iterator[Clip]:
    """List every clip, in a fixed order."""
    for parts in product(COLOURS, SHAPES, DIRECTIONS, BACKGROUNDS):
        if parts[0] != parts[-1]:
            yield Clip(*parts)


def is_held_out(clip: Clip) -> bool:
    """Say whether this combination is kept from training: one in five, as in a Latin square.

    Any three of its four parts are seen together in training, but never all four.
    """
    assert clip.background is not None
    places = (
        COLOURS.index(clip.colour),
        SHAPES.index(clip.shape),
        tuple(DIRECTIONS).index(clip.direction),
        BACKGROUNDS.index(clip.background),
    )
    return sum(places) % 5 == 0


def prompts(count: int, held_out: bool = True, seed: int = 0) -> list[str]:
    """Choose canonical captions, all different.

    Args:
        held_out: choose among the held-out combinations, or among those trained on.
    """
    pool = [caption(clip) for clip in clips() if is_held_out(clip) is held_out]
    return random.Random(seed).sample(pool, count)


def draw(clip: Clip, rng: random.Random) -> list[Image.Image]:
    """Draw a clip, with size, place and way by chance, but not much of it.

    Returns:
        `FRAMES` anti-aliased RGB pictures, `SIZE_PX` square. The shape goes through the
        middle of the video at an even pace, some 22 pixels in all, and never touches the
        border.
    """
    background = clip.background or rng.choice([c for c in BACKGROUNDS if c != clip.colour])
    right, down = DIRECTIONS[clip.direction]
    r, way = rng.uniform(9.5, 10.5), rng.uniform(21, 23)
    late, aside = rng.uniform(-0.5, 0.5), rng.uniform(-2, 2)
    size = SIZE_PX * _OVERSAMPLING
    frames = []
    for frame in range(FRAMES):
        gone = way * (frame / (FRAMES - 1) - 0.5) + late  # from the middle
        cx = SIZE_PX / 2 + right * gone + abs(down) * aside
        cy = SIZE_PX / 2 + down * gone + abs(right) * aside
        picture = Image.new("RGB", (size, size), PALETTE[background])
        left, top, far, bottom = (s * _OVERSAMPLING for s in (cx - r, cy - r, cx + r, cy + r))
        paint(ImageDraw.Draw(picture), clip.shape, (left, top, far, bottom), PALETTE[clip.colour])
        frames.append(picture.reduce(_OVERSAMPLING))
    return frames


def sample(rng: random.Random) -> tuple[Clip, str]:
    """Choose a clip to train on, and a caption of it, mostly canonical.

    The caption may leave the background out; the clip still names it.
    """
    while True:
        choices = (COLOURS, SHAPES, tuple(DIRECTIONS), BACKGROUNDS)
        clip = Clip(*(rng.choice(parts) for parts in choices))
        if clip.colour != clip.background and not is_held_out(clip):
            break
    wording = Wording(
        articles=rng.random() > 0.08,
        background_word=rng.random() > 0.08,
        background_clause=rng.random() > 0.08,
    )
    return clip, caption(clip, wording)
