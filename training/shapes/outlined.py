"""The style of the adapter `outlined`: shapes as outlines, hollow inside.

`outline` is its pen for `draw.draw`; `is_outlined` and `why_not_outlined` judge it. Only the outer
contour is drawn, so rings and circles both become thin circles.
"""

import numpy as np
from PIL import Image, ImageDraw

from training.shapes.draw import OVERSAMPLING, Item, Scene, corners, parse
from training.shapes.judge import Mask, inner, shapes_of, why_not

WALL_PX = 3.75
MIN_HOLLOW = 0.12  # enclosed share of a hollow shape; filled shapes have no hole,
MIN_ROUND_HOLLOW = 0.42  # except rings, with a share of 0.36
ROUND = (0.70, 0.87)  # area of a circle in its box: pi / 4; square 1, other shapes 0.6


def outline(
    canvas: ImageDraw.ImageDraw,
    shape: str,
    box: tuple[float, float, float, float],
    fill: object,
) -> None:
    """Draw the contour of one shape so that it fills a box, with a wall of `WALL_PX`."""
    width, half = round(WALL_PX * OVERSAMPLING), WALL_PX * OVERSAMPLING / 2
    left, top, right, bottom = box
    if shape in ("circle", "ring"):
        canvas.ellipse(box, outline=fill, width=width)  # type: ignore[arg-type]
    elif shape == "square":
        canvas.rectangle(box, outline=fill, width=width)  # type: ignore[arg-type]
    else:
        around = corners(shape, (left + half, top + half, right - half, bottom - half))
        canvas.line([*around, *around[:2]], fill=fill, width=width, joint="curve")  # type: ignore[arg-type]


def is_outlined(image: Image.Image) -> bool:
    """Return whether every shape in a picture is a hollow outline."""
    shapes = shapes_of(image)
    return bool(shapes) and all(_is_hollow(part) for part in shapes)


def why_not_outlined(image: Image.Image, expected: Scene | str) -> str:
    """Explain why a picture does not match the scene or caption in outlines.

    Returns:
        An empty string if the picture is right.
    """
    if not is_outlined(image):
        return "is not drawn in outlines"
    scene = parse(expected) if isinstance(expected, str) else expected
    items = tuple(
        Item(item.colour, "circle" if item.shape == "ring" else item.shape) for item in scene.items
    )
    return why_not(filled(image), Scene(scene.background, items))


def filled(image: Image.Image) -> Image.Image:
    """Fill enclosed areas with the colour of their wall, up to the middle of the wall."""
    rgb = np.array(image.convert("RGB"))
    for part in shapes_of(image):
        hollow = _enclosed(part)
        wall = rgb[part].astype(np.float64)
        away = np.linalg.norm(wall - np.median(rgb.reshape(-1, 3), axis=0), axis=-1)
        core = wall[away >= np.quantile(away, 0.6)]  # without edge pixels
        rgb[~inner(~hollow) & (hollow | part)] = np.median(core, axis=0).round()
    return Image.fromarray(rgb)


def _is_hollow(part: Mask) -> bool:
    filled_part = part | (hollow := _enclosed(part))
    height, width = (int(np.ptp(np.flatnonzero(filled_part.any(axis=axis)))) + 1 for axis in (1, 0))
    is_round = ROUND[0] < filled_part.sum() / (height * width) < ROUND[1]
    least = MIN_ROUND_HOLLOW if is_round else MIN_HOLLOW
    return bool(hollow.sum() / filled_part.sum() >= least)


def _enclosed(part: Mask) -> Mask:
    """Pixels outside of a part that are not 4-connected to the border."""
    outside = np.pad(~part, 1, constant_values=True)
    reached = np.zeros_like(outside)
    reached[0] = reached[-1] = reached[:, 0] = reached[:, -1] = True
    while True:
        grown = reached.copy()
        grown[1:] |= reached[:-1]
        grown[:-1] |= reached[1:]
        grown[:, 1:] |= reached[:, :-1]
        grown[:, :-1] |= reached[:, 1:]
        grown &= outside
        if (grown == reached).all():
            return ~part & ~reached[1:-1, 1:-1]
        reached = grown
