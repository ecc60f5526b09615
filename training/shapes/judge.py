"""Recognise the content of a picture from geometry and colour alone.

The border defines the background. The rest is split into connected parts; each must have
one colour of the palette and cover its bounding box like exactly one of the six shapes.
Any doubt makes the picture unclear, with a reason.

The thresholds were set on drawn pictures with noise and blur, before judging any model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from training.shapes.draw import PALETTE, SHAPES, SIZE_PX, Item, Scene, caption, paint, parse

MAX_COLOUR_DISTANCE = 45.0  # RGB, Euclidean; the two nearest colours are 98 apart
FOREGROUND_DISTANCE = 48.0  # distance to the background's colour
SPECK_PX = 12  # parts smaller than this many pixels are ignored
BORDER_PX = 2
MIN_BORDER = 0.80  # minimum share of the border in one colour
MIN_UNIFORM = 0.85  # minimum share of a shape's inside in its colour
MIN_IOU = 0.80  # with the ideal shape in the same box
MIN_MARGIN = 0.05  # IoU above the second-best shape's
MAX_STRETCH = 1.30  # longer over shorter side of the box
MIN_APART_PX = 10.0  # horizontal distance of two shapes' centres


Mask = NDArray[np.bool_]
Pixels = NDArray[np.float64]

_NAMES = tuple(PALETTE)
_COLOURS: Pixels = np.array(list(PALETTE.values()), dtype=np.float64)


Content = TypeVar("Content")  # a `Scene`, or a video's `MovingShape`


@dataclass(frozen=True, slots=True)
class Judgement(Generic[Content]):
    """The recognised content of a picture or video, or the reason why it is unclear."""

    shown: Content | None
    reason: str = ""  # empty if the content is clear

    def why_not(self, expected: Any, caption: Callable[[Content], str]) -> str:
        """Explain the difference to the expected content; an empty string if it matches.

        Args:
            expected: without a background, any background matches.
        """
        if self.shown is None:
            return self.reason
        shown: Any = self.shown
        if expected.background is None:
            expected = replace(expected, background=shown.background)
        return "" if shown == expected else f"shows {caption(self.shown)}"


class Unclear(Exception):
    """The content is unclear; the message is the reason."""


def judge(image: Image.Image) -> Judgement[Scene]:
    """Recognise the content of a picture.

    Args:
        image: `SIZE_PX` square.

    Raises:
        ValueError: the picture has another size.
    """
    if image.size != (SIZE_PX, SIZE_PX):
        raise ValueError(
            f"a picture of {image.width}x{image.height} cannot be judged: resize it to"
            f" {SIZE_PX}x{SIZE_PX}"
        )
    rgb = np.asarray(image.convert("RGB"), dtype=np.float64)
    try:
        return Judgement(_scene(rgb))
    except Unclear as unclear:
        return Judgement(None, str(unclear))


def why_not(image: Image.Image, expected: Scene | str) -> str:
    """Explain why a picture does not match the expected scene or caption.

    Returns:
        An empty string if the picture is right.
    """
    return judge(image).why_not(parse(expected) if isinstance(expected, str) else expected, caption)


def shows(image: Image.Image, expected: Scene | str) -> bool:
    """Return whether a picture matches a scene or a caption."""
    return not why_not(image, expected)


def _scene(rgb: Pixels) -> Scene:
    background = _background(rgb)
    parts = _parts(rgb, background)
    if not 1 <= len(parts) <= 2:
        raise Unclear(f"has {len(parts)} shapes, not one or two")
    parts.sort(key=_middle)
    if len(parts) == 2 and _middle(parts[1]) - _middle(parts[0]) < MIN_APART_PX:
        raise Unclear("has two shapes, but not side by side")
    return Scene(background, tuple(_item(rgb, part, background) for part in parts))


def shapes_of(image: Image.Image) -> list[Mask]:
    """Find the pixels of each shape; none if the background is unclear."""
    rgb = np.asarray(image.convert("RGB"), dtype=np.float64)
    try:
        return _parts(rgb, _background(rgb))
    except Unclear:
        return []


def _background(rgb: Pixels) -> str:
    """Name the colour of the border."""
    edge = np.ones(rgb.shape[:2], dtype=bool)
    edge[BORDER_PX:-BORDER_PX, BORDER_PX:-BORDER_PX] = False
    name, share = _colour(rgb[edge])
    if share < MIN_BORDER:
        raise Unclear(f"has {name} on only {share:.0%} of its border")
    return name


def _item(rgb: Pixels, part: Mask, background: str) -> Item:
    """Name the colour and the shape of one connected part."""
    inside = inner(part)
    name, share = _colour(rgb[inside if inside.sum() >= SPECK_PX else part])
    if share < MIN_UNIFORM:
        raise Unclear(f"has a shape that is {name} on only {share:.0%} of its inside")
    if name == background:
        raise Unclear(f"has a shape in the colour of the background, {name}")
    own, background_colour = _COLOURS[_NAMES.index(name)], _COLOURS[_NAMES.index(background)]
    nearer = np.linalg.norm(rgb - own, axis=-1) < np.linalg.norm(rgb - background_colour, axis=-1)
    return Item(name, _shape(part & nearer))


def _colour(inside: Pixels) -> tuple[str, float]:
    """Name the colour of some pixels, and the share of pixels nearest to it."""
    middle = np.median(inside, axis=0)
    far = np.linalg.norm(_COLOURS - middle, axis=-1)
    best = int(far.argmin())
    if far[best] > MAX_COLOUR_DISTANCE:
        rgb = ", ".join(f"{value:.0f}" for value in middle)
        raise Unclear(f"has the colour ({rgb}), {far[best]:.0f} away from {_NAMES[best]}")
    nearest = np.linalg.norm(inside[:, None] - _COLOURS, axis=-1).argmin(axis=1)
    return _NAMES[best], float((nearest == best).mean())


def _shape(part: Mask) -> str:
    """Name the shape whose coverage of its bounding box matches the part's."""
    rows, columns = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    if not len(rows):
        raise Unclear("has a shape that is all edge")
    top, left, height, width = rows[0], columns[0], int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
    if max(height, width) > MAX_STRETCH * min(height, width):
        raise Unclear(f"has a shape of {width}x{height} pixels, too stretched")
    mask = np.pad(part[top : top + height, left : left + width], 1)
    overlap = {}
    for shape in SHAPES:
        ideals = _ideals(shape, width, height)
        both = (ideals & mask).sum(axis=(1, 2))
        overlap[shape] = float((both / (ideals | mask).sum(axis=(1, 2))).max())
    best, second = sorted(SHAPES, key=lambda shape: -overlap[shape])[:2]
    if overlap[best] < MIN_IOU:
        raise Unclear(f"has a shape that is a {best} by only {overlap[best]:.2f}")
    if overlap[best] - overlap[second] < MIN_MARGIN:
        raise Unclear(f"has a shape between {best} and {second}")
    return best


@lru_cache(maxsize=4096)
def _ideals(shape: str, width: int, height: int) -> Mask:
    """Render a shape that fills a box, in all accepted variants.

    The tips of stars and triangles are thinner than a pixel, so they may appear a pixel
    short: each side is tried in place and one pixel further out.

    Returns:
        (1 or 16, height + 2, width + 2); pixels at least half covered count.
    """
    grown = (0, 1) if shape in ("star", "triangle") else (0,)
    masks = []
    for left, top, right, bottom in product(grown, repeat=4):
        picture = Image.new("L", ((width + 2) * 4, (height + 2) * 4))
        sides = (4 - 4 * left, 4 - 4 * top, (width + right) * 4 + 3, (height + bottom) * 4 + 3)
        paint(ImageDraw.Draw(picture), shape, sides, 255)
        masks.append(np.asarray(picture.reduce(4)) >= 128)
    return np.stack(masks)


def _middle(part: Mask) -> float:
    """The mean column of a part."""
    return float(np.nonzero(part)[1].mean())


def inner(part: Mask) -> Mask:
    """Remove pixels that have one of their eight neighbours outside the part."""
    padded = np.pad(part, 1)
    height, width = part.shape
    inside = part.copy()
    for down in range(3):
        for right in range(3):
            inside &= padded[down : down + height, right : right + width]
    return inside


def _parts(rgb: Pixels, background: str) -> list[Mask]:
    """Split the foreground into connected parts (8-connectivity)."""
    away = np.linalg.norm(rgb - _COLOURS[_NAMES.index(background)], axis=-1)
    mask = np.pad(away > FOREGROUND_DISTANCE, 1)  # padding prevents growth into the next row
    width, packed = mask.shape[1], np.packbits(mask)
    left = int.from_bytes(packed.tobytes(), "big")  # a bit for each pixel
    parts = []
    while left:
        part, smaller = left & -left, 0
        while part != smaller:
            smaller = part
            part |= part << 1 | part >> 1
            part = (part | part << width | part >> width) & left
        left ^= part
        if part.bit_count() >= SPECK_PX:
            bits = np.frombuffer(part.to_bytes(len(packed), "big"), np.uint8)
            pixels = np.unpackbits(bits, count=mask.size).reshape(mask.shape)
            parts.append(pixels[1:-1, 1:-1].astype(bool))
    return parts
