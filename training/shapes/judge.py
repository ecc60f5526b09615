"""Say what a picture shows, by geometry and colour alone.

The background is what the border shows. Everything else falls into connected parts;
each must have one colour of the palette and cover its bounding box as exactly one of
the six shapes would. Whatever is in doubt is unclear, with the reason.

Numbers here were set on drawn pictures, with noise and blur, before any model was judged.
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
FOREGROUND_DISTANCE = 48.0  # from the background's colour
SPECK_PX = 12  # parts smaller than this many pixels are ignored
BORDER_PX = 2
MIN_BORDER = 0.80  # share of the border that must have one colour
MIN_UNIFORM = 0.85  # share of a shape's inside that must have its colour
MIN_IOU = 0.80  # with the ideal shape in the same box
MIN_MARGIN = 0.05  # IoU over that of the second-best shape
MAX_STRETCH = 1.30  # longer over shorter side of the box
MIN_APART_PX = 10.0  # between the middles of two shapes, from left to right


Mask = NDArray[np.bool_]
Pixels = NDArray[np.float64]

_NAMES = tuple(PALETTE)
_COLOURS: Pixels = np.array(list(PALETTE.values()), dtype=np.float64)


Shown = TypeVar("Shown")  # a `Scene`, or what a video shows


@dataclass(frozen=True, slots=True)
class Judgement(Generic[Shown]):
    """What a picture or video shows, or why that cannot be said."""

    shown: Shown | None
    reason: str = ""  # empty if something is shown

    def why_not(self, wanted: Any, caption: Callable[[Shown], str]) -> str:
        """Say why it is not what was wanted; an empty string if it is.

        Args:
            wanted: without a background it may have any.
        """
        if self.shown is None:
            return self.reason
        shown: Any = self.shown
        if wanted.background is None:
            wanted = replace(wanted, background=shown.background)
        return "" if shown == wanted else f"shows {caption(self.shown)}"


class Unclear(Exception):
    """What is shown cannot be said; the message is the reason."""


def judge(image: Image.Image) -> Judgement[Scene]:
    """Say what a picture shows.

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


def why_not(image: Image.Image, wanted: Scene | str) -> str:
    """Say why a picture is not the scene, or the caption, that was asked for.

    Returns:
        An empty string if the picture is right.
    """
    return judge(image).why_not(parse(wanted) if isinstance(wanted, str) else wanted, caption)


def shows(image: Image.Image, wanted: Scene | str) -> bool:
    """Say whether a picture shows a scene, or what a caption says."""
    return not why_not(image, wanted)


def _scene(rgb: Pixels) -> Scene:
    background = _background(rgb)
    found = _parts(rgb, background)
    if not 1 <= len(found) <= 2:
        raise Unclear(f"has {len(found)} shapes, not one or two")
    found.sort(key=_middle)
    if len(found) == 2 and _middle(found[1]) - _middle(found[0]) < MIN_APART_PX:
        raise Unclear("has two shapes, but not side by side")
    return Scene(background, tuple(_item(rgb, part, background) for part in found))


def shapes_of(image: Image.Image) -> list[Mask]:
    """Find the pixels of each shape; none where the background cannot be told."""
    rgb = np.asarray(image.convert("RGB"), dtype=np.float64)
    try:
        return _parts(rgb, _background(rgb))
    except Unclear:
        return []


def _background(rgb: Pixels) -> str:
    """Name the colour that the border shows."""
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
    own, other = _COLOURS[_NAMES.index(name)], _COLOURS[_NAMES.index(background)]
    nearer = np.linalg.norm(rgb - own, axis=-1) < np.linalg.norm(rgb - other, axis=-1)
    return Item(name, _shape(part & nearer))


def _colour(inside: Pixels) -> tuple[str, float]:
    """Name the colour of some pixels, and the share of them that is nearest to it."""
    middle = np.median(inside, axis=0)
    far = np.linalg.norm(_COLOURS - middle, axis=-1)
    best = int(far.argmin())
    if far[best] > MAX_COLOUR_DISTANCE:
        rgb = ", ".join(f"{value:.0f}" for value in middle)
        raise Unclear(f"has the colour ({rgb}), {far[best]:.0f} away from {_NAMES[best]}")
    nearest = np.linalg.norm(inside[:, None] - _COLOURS, axis=-1).argmin(axis=1)
    return _NAMES[best], float((nearest == best).mean())


def _shape(part: Mask) -> str:
    """Name the shape that covers the part's bounding box as the part does."""
    rows, columns = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    if not len(rows):
        raise Unclear("has a shape that is all edge")
    top, left, height, width = rows[0], columns[0], int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
    if max(height, width) > MAX_STRETCH * min(height, width):
        raise Unclear(f"has a shape of {width}x{height} pixels, too stretched")
    seen = np.pad(part[top : top + height, left : left + width], 1)
    overlap = {}
    for shape in SHAPES:
        ideals = _ideals(shape, width, height)
        both = (ideals & seen).sum(axis=(1, 2))
        overlap[shape] = float((both / (ideals | seen).sum(axis=(1, 2))).max())
    best, second = sorted(SHAPES, key=lambda shape: -overlap[shape])[:2]
    if overlap[best] < MIN_IOU:
        raise Unclear(f"has a shape that is a {best} by only {overlap[best]:.2f}")
    if overlap[best] - overlap[second] < MIN_MARGIN:
        raise Unclear(f"has a shape between {best} and {second}")
    return best


@lru_cache(maxsize=4096)
def _ideals(shape: str, width: int, height: int) -> Mask:
    """Render a shape that fills a box, in all the ways that count as filling it.

    The tips of a star or a triangle are thinner than a pixel, so what is seen of them
    may be a pixel short: each side is tried where it is and one pixel further out.

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
    """Give the mean column of a part."""
    return float(np.nonzero(part)[1].mean())


def inner(part: Mask) -> Mask:
    """Take away pixels with a neighbour, one of eight, outside the part."""
    padded = np.pad(part, 1)
    height, width = part.shape
    inside = part.copy()
    for down in range(3):
        for right in range(3):
            inside &= padded[down : down + height, right : right + width]
    return inside


def _parts(rgb: Pixels, background: str) -> list[Mask]:
    """Split what is not background into connected parts, corners touching included."""
    away = np.linalg.norm(rgb - _COLOURS[_NAMES.index(background)], axis=-1)
    mask = np.pad(away > FOREGROUND_DISTANCE, 1)  # nothing grows from one row into the next
    width, packed = mask.shape[1], np.packbits(mask)
    left = int.from_bytes(packed.tobytes(), "big")  # a bit for each pixel
    found = []
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
            found.append(pixels[1:-1, 1:-1].astype(bool))
    return found
