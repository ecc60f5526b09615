"""Sizes of pictures: checks for a model, and the nearest valid size."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from carpool.errors import SizeRejected
from carpool.request.card import Card, Task
from carpool.request.values import is_int

SIDES = ("upsampling_width", "upsampling_height", "frame_size", "max_input_image_size")
"""Further parameters for sides of pictures."""


def rounded_size(card: Card, task: Task, arguments: Mapping[str, Any]) -> str | None:
    """The warning for a size that the pipeline rounds down; None if exact."""
    sides, multiple = _sides(card, task, arguments), card.size_multiple_px
    if not any(side % multiple for side in sides):
        return None
    rounded = [side // multiple * multiple for side in sides]
    return f"size {_by(sides)} was rounded down to {_by(rounded)}, multiples of {multiple}"


def _sides(card: Card, task: Task, arguments: Mapping[str, Any]) -> list[int]:
    """Known sides (width, height); empty for a task that takes the size of its picture."""
    default = card.usual_size_px or (None, None)
    return [
        side
        for name, default_side in zip(("width", "height"), default, strict=True)
        if task.takes(name)
        and (side := default_side if arguments.get(name) is None else arguments[name]) is not None
    ]


def area_of(card: Card, arguments: Mapping[str, Any]) -> dict[str, int]:
    """The `max_area` that makes a pipeline use width and height exactly; {} if not needed.

    In such a pipeline (FLUX Kontext) width and height only set the aspect ratio. An explicit area,
    from the request or the server's defaults, is kept.
    """
    named = {name: value for name, value in arguments.items() if value is not None}
    has_size = "width" in named or "height" in named
    if not card.task_for(named).takes("max_area") or "max_area" in named:
        return {}
    if "max_area" in card.defaults and not has_size:
        return {}
    width, height = ((card.defaults | named).get(name) for name in ("width", "height"))
    if width is None or height is None or not (is_int(width) and is_int(height)):
        return {}
    return {"max_area": width * height}


def check_size(card: Card, arguments: Mapping[str, Any], task: Task | None = None) -> None:
    """Refuse a size that the pipeline refuses, or that has too many pixels.

    Args:
        task: task of the request; default: the model's own.
    """
    task = task or card.tasks[0]
    sides, multiple = _sides(card, task, arguments), card.size_multiple_px
    defaults = {parameter.name: parameter.default for parameter in task.parameters}
    area = arguments.get("max_area", defaults.get("max_area"))
    min_side = multiple if card.rounds_sizes else 1
    if any(side < min_side or (side % multiple and not card.rounds_sizes) for side in sides):
        legal = [max(multiple, round(side / multiple) * multiple) for side in sides]
        raise SizeRejected(
            f"size {_by(sides)} is not supported: both sides must be multiples of {multiple}, "
            f"above 0; the nearest size is {_by(legal)}",
            param="size",
        )
    if area is not None and area != math.prod(sides):
        _check_area(card, area, sides)
    elif len(sides) == 2 and math.prod(sides) > card.max_pixels:
        max_side = card.max_pixels // multiple // multiple * multiple
        fits = [min(side, max_side) for side in within(sides, card.max_pixels, multiple)]
        raise SizeRejected(
            f"size {_by(sides)} is not supported: it has {math.prod(sides)} pixels, the limit "
            f"is {card.max_pixels}; the nearest size of this shape is {_by(fits)}",
            param="size",
        )
    _check_areas(card, arguments, sides)


def _check_areas(card: Card, arguments: Mapping[str, Any], sides: Sequence[int]) -> None:
    """Check parameters other than width and height that set a size."""
    max_side = math.isqrt(card.max_pixels)
    lone = ("width", "height") if len(sides) == 1 else ()
    for name in (*lone, *SIDES):
        side = arguments.get(name)
        if side is not None and side > max_side:
            rule = "; say width and height" if name in lone else ""
            raise SizeRejected.of(name, side, f"must be at most {max_side}{rule}")


def _check_area(card: Card, area: int, sides: Sequence[int]) -> None:
    """Check the number of pixels that a pipeline draws in the ratio of width and height."""
    ratio = max(sides) / min(sides) if len(sides) == 2 else 1.0
    min_area = math.ceil(card.size_multiple_px**2 * ratio)  # the shorter side is one multiple
    if not min_area <= area <= card.max_pixels:
        rule = f"must be from {min_area} to {card.max_pixels}, in pixels"
        raise SizeRejected.of("max_area", area, rule)


def within(size: Sequence[int], max_pixels: int, multiple: int) -> tuple[int, int]:
    """The largest valid size of about this aspect ratio that does not exceed `size`."""
    shrink = min(1.0, math.sqrt(max_pixels / math.prod(size)))
    width, height = (max(multiple, int(side * shrink) // multiple * multiple) for side in size)
    return width, height


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))
