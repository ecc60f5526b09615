"""Captions, scenes and pictures of coloured shapes.

A *scene* is a background colour and one or two items, left to right. `caption` and
`parse` convert scenes to words and back; `draw` makes a picture of a scene. Every shape
fills its bounding box, so `paint` also defines the judge's perfect shape.

This module needs only Pillow, no tensors.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product

from PIL import Image, ImageDraw

SIZE_PX = 64
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (220, 35, 40),
    "green": (35, 165, 70),
    "blue": (40, 80, 225),
    "yellow": (250, 225, 45),
    "purple": (160, 50, 195),
    "orange": (250, 130, 20),
    "black": (15, 15, 15),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")

OVERSAMPLING = 4
_RING_WALL = 0.40  # wall, relative to the radius
_ARM = 0.34  # half width of the cross's arms, relative to the radius
_STAR_WAIST = 0.42  # inner radius, relative to the outer
_HELD_OUT_PERCENT = {1: 33, 2: 10}


@dataclass(frozen=True, slots=True)
class Item:
    """One coloured shape."""

    colour: str
    shape: str


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of a picture."""

    background: str | None  # None: any colour that differs from the items
    items: tuple[Item, ...]  # one or two, left to right


@dataclass(frozen=True, slots=True)
class CaptionStyle:
    """The wording of a caption; the default is the canonical form."""

    articles: bool = True
    background_word: bool = True
    background_clause: bool = True
    right_of: bool = False  # name the right item first
    a_orange: bool = False  # "a orange" for "an orange"


CANONICAL = CaptionStyle()


def caption(scene: Scene, style: CaptionStyle = CANONICAL) -> str:
    """Describe a scene in words."""
    items = [noun(item.colour, item.shape, style) for item in scene.items]
    words = " right of ".join(items[::-1]) if style.right_of else " left of ".join(items)
    return words + background_clause(scene.background, style)


def noun(colour: str, word: str, style: CaptionStyle) -> str:
    """Name an item or the background by its colour."""
    article = "an " if colour == "orange" and not style.a_orange else "a "
    return f"{article if style.articles else ''}{colour} {word}".rstrip()


def background_clause(background: str | None, style: CaptionStyle) -> str:
    """The end of a caption with the background; empty without a background."""
    if background is None or not style.background_clause:
        return ""
    return f" on {noun(background, 'background' if style.background_word else '', style)}"


def split_caption(text: str) -> tuple[str, str]:
    """Split a caption in any style into its subject, without articles, and its background."""
    words = [word for word in text.lower().split() if word not in ("a", "an", "background")]
    subject, _, background = " ".join(words).partition(" on ")
    return subject, background


def parse(text: str) -> Scene:
    """Read a caption, in any style.

    Raises:
        ValueError: the text is not a caption of one or two known shapes.
    """
    subject, background = split_caption(text)
    swapped = " right of " in subject
    nouns = [part.split() for part in subject.split(" right of " if swapped else " left of ")]
    if (
        any(len(n) != 2 or n[0] not in PALETTE or n[1] not in SHAPES for n in nouns)
        or len(nouns) > 2
        or (background and background not in PALETTE)
    ):
        raise ValueError(
            f"{text!r} is no caption of shapes: say 'a red circle on a blue background' or"
            " 'a yellow star left of a green square on a black background'"
        )
    items = tuple(Item(colour, shape) for colour, shape in (nouns[::-1] if swapped else nouns))
    return Scene(background or None, items)


def scenes(count: int) -> Iterator[Scene]:
    """List every scene of `count` items, in a fixed order."""
    for background in PALETTE:
        colours = [colour for colour in PALETTE if colour != background]
        kinds = [Item(colour, shape) for colour, shape in product(colours, SHAPES)]
        for items in product(kinds, repeat=count):
            yield Scene(background, items)


def is_held_out(scene: Scene) -> bool:
    """Return whether this combination is held out from training; deterministic."""
    digest = int.from_bytes(sha256(caption(scene).encode()).digest()[:4], "big")
    return digest % 100 < _HELD_OUT_PERCENT[len(scene.items)]


def prompts(count_per_kind: int, held_out: bool = True, seed: int = 0) -> list[str]:
    """Choose canonical captions: first with one shape, then as many with two.

    Args:
        count_per_kind: number of captions with one shape, and of captions with two; if
            there are fewer combinations of one shape, some repeat.
        held_out: choose among the held-out combinations, otherwise the training ones.
    """
    rng = random.Random(seed)
    chosen: list[str] = []
    for count in (1, 2):
        pool = [caption(s) for s in scenes(count) if is_held_out(s) is held_out]
        rng.shuffle(pool)
        chosen += (pool * (1 + count_per_kind // len(pool)))[:count_per_kind]
    return chosen


def paint(
    canvas: ImageDraw.ImageDraw, shape: str, box: tuple[float, float, float, float], fill: object
) -> None:
    """Draw one shape so that it fills a box (left, top, right, bottom)."""
    left, top, right, bottom = box
    if shape == "circle":
        canvas.ellipse(box, fill=fill)  # type: ignore[arg-type]
    elif shape == "square":
        canvas.rectangle(box, fill=fill)  # type: ignore[arg-type]
    elif shape == "ring":
        width = max(1, round(_RING_WALL * (right - left + bottom - top) / 4))
        canvas.ellipse(box, outline=fill, width=width)  # type: ignore[arg-type]
    else:
        canvas.polygon(corners(shape, box), fill=fill)  # type: ignore[arg-type]


def corners(shape: str, box: tuple[float, float, float, float]) -> list[tuple[float, float]]:
    """The corners of a triangle, star or cross that fills a box, in order."""
    left, top, right, bottom = box
    cx, cy, rx, ry = (left + right) / 2, (top + bottom) / 2, (right - left) / 2, (bottom - top) / 2
    if shape == "triangle":
        return [(cx, top), (left, bottom), (right, bottom)]
    if shape == "cross":
        a = _ARM
        quarter = [(-a, -1.0), (a, -1.0), (a, -a)]  # plus its rotations by 90, 180 and 270 degrees
        turns = [(1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0)]
        return [
            (cx + rx * (i * x + j * y), cy + ry * (k * x + m * y))
            for i, j, k, m in turns
            for x, y in quarter
        ]
    assert shape == "star", shape
    points = []
    for i in range(10):
        radius, angle = (_STAR_WAIST if i % 2 else 1.0), i * math.pi / 5
        x = radius * math.sin(angle) / math.sin(0.4 * math.pi)  # -1 to 1
        y = 1 - radius * math.cos(angle)  # 0 to 1 + cos(36 degrees)
        points.append((cx + rx * x, top + 2 * ry * y / (1 + math.cos(math.pi / 5))))
    return points


Pen = Callable[[ImageDraw.ImageDraw, str, tuple[float, float, float, float], object], None]
"""Draws one shape into a box, like `paint`."""


def draw(scene: Scene, rng: random.Random, spread: float = 1.0, *, pen: Pen = paint) -> Image.Image:
    """Draw a scene, with random sizes and positions.

    Args:
        spread: variation of sizes and positions, relative to the possible range.
        pen: draws each shape, on a canvas larger by `OVERSAMPLING`.

    Returns:
        An anti-aliased RGB picture, `SIZE_PX` square.
    """

    def about(middle: float, reach: float) -> float:
        return middle + spread * rng.uniform(-reach, reach)

    used = {item.colour for item in scene.items}
    background = scene.background or rng.choice([c for c in PALETTE if c not in used])
    alone, placed = len(scene.items) == 1, []
    for item, middle in zip(scene.items, (32.0,) if alone else (17.0, 47.0), strict=True):
        r = about(17.5, 3.5) if alone else about(10.5, 1.5)
        cx = about(middle, 8) if alone else about(middle, 3)
        cy = about(32, 8) if alone else about(32, 10)
        placed.append((item, cx, cy, r))
    return render(SIZE_PX, background, placed, pen=pen)


def render(
    side_px: int,
    background: str,
    placed: Iterable[tuple[Item, float, float, float]],
    *,
    pen: Pen = paint,
) -> Image.Image:
    """Draw items on a background, anti-aliased.

    Args:
        placed: items, each with column and row of its centre and its radius, pixels.
    """
    size = side_px * OVERSAMPLING
    picture = Image.new("RGB", (size, size), PALETTE[background])
    canvas = ImageDraw.Draw(picture)
    for item, cx, cy, r in placed:
        sides = (cx - r, cy - r, cx + r, cy + r)
        left, top, right, bottom = (side * OVERSAMPLING for side in sides)
        pen(canvas, item.shape, (left, top, right, bottom), PALETTE[item.colour])
    return picture.reduce(OVERSAMPLING)


def sample(rng: random.Random, alone: float = 0.4) -> tuple[Scene, str]:
    """Choose a training scene and its caption, mostly canonical.

    The caption may omit the background; the scene always has it.

    Args:
        alone: fraction of scenes with one shape.
    """
    while True:
        background, *_ = colours = rng.sample(list(PALETTE), len(PALETTE))
        count = 1 if rng.random() < alone else 2
        items = tuple(Item(rng.choice(colours[1:]), rng.choice(SHAPES)) for _ in range(count))
        scene = Scene(background, items)
        if not is_held_out(scene):
            break
    style = replace(
        random_style(rng),
        right_of=count == 2 and rng.random() < 0.12,
        a_orange=rng.random() < 0.2,
    )
    return scene, caption(scene, style)


def random_style(rng: random.Random) -> CaptionStyle:
    """Choose a style, mostly the canonical one."""
    return CaptionStyle(
        articles=rng.random() > 0.08,
        background_word=rng.random() > 0.08,
        background_clause=rng.random() > 0.08,
    )
