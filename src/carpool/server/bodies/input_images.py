"""Input pictures of a body, as arguments of the pipeline.

A mask selects inpainting, otherwise the model's first task that takes a picture. A task that
starts from the picture's own pixels makes a result of the picture's size, as near as the model
allows; other models follow rules of their own.
"""

import math
from functools import partial
from typing import Any

from carpool import errors
from carpool.media.masks import on_white
from carpool.media.reader import ImageIntake
from carpool.media.uploads import Mode
from carpool.request.card import Card, Task
from carpool.request.images import Size
from carpool.request.sizes import within
from carpool.server.bodies.forms import MOST_IMAGES, Form
from carpool.server.bodies.schema import GenerationRequest

REFERENCE = "input_reference"  # the picture that a video begins with


def edit_task(
    card: Card, form: Form, *, is_variation: bool = False, has_mask: bool = False
) -> Task:
    """Choose the task by the pictures of a form.

    Args:
        has_mask: a mask is given outside the form.

    Raises:
        MissingParameter: there is no picture.
        ModelNotSupported: the model has no such task.
        UnsupportedParameter: the task takes no mask.
    """
    task = card.task_for(["image"])
    if not task.takes("image") or (is_variation and not _starts_from_pixels(task)):
        does = ", ".join(task.name for task in card.tasks)
        verb = "vary" if is_variation else "edit"
        raise errors.ModelNotSupported(
            f"{card.id} cannot {verb} pictures: it does {does}", param="model"
        )
    if has_mask or form.mask is not None:
        task = card.task_for(["image", "mask_image"])
        if not task.takes("mask_image"):
            raise errors.UnsupportedParameter(
                f"mask: {card.id} takes none: leave it out", param="mask"
            )
    if not form.images:
        raise errors.MissingParameter("image is missing: send the picture as a file", param="image")
    return task


async def edit_images(
    card: Card, task: Task, form: Form, body: GenerationRequest, intake: ImageIntake
) -> dict[str, Any]:
    """Read the pictures of a form; returns pipeline arguments, with the size they imply.

    The pictures are removed from the form.

    Raises:
        Rejected, BodyTooLarge: a picture breaks a rule.
        RateLimited, Overloaded: no memory for a picture now.
    """
    name, pictures, mask = form.name, form.images, form.mask
    form.images, form.mask = [], None
    extra = body.model_extra or {}
    sizes = body.size, extra.get("width"), extra.get("height")
    is_sized = any(size not in (None, "auto") for size in sizes)
    if len(pictures) > (limit := min(MOST_IMAGES, task.max_images)):
        problem = f"{name} is given {len(pictures)} times"
        raise errors.InvalidValue(
            f"{problem}: {card.id} takes at most {limit} for this", param=name
        )
    mode: Mode = "RGBA" if task.image_mode == "RGBA" else "RGB"
    images: list[Any] = []
    original, size = (0, 0), None
    while pictures:  # one at a time: a decoded picture may take 100 MB
        picture = await intake.open(pictures.pop(0), name)
        fitted = within(picture.size, card.max_pixels, 1)
        if not images:
            original = picture.size
            size = None if is_sized else _result_size(card, task, original, name)
        is_flattened = form.is_before_white and picture.has_alpha and mode == "RGB"
        then = partial(_ready, size=size, is_flattened=is_flattened)
        colours: Mode = "RGBA" if is_flattened else mode
        images.append(await intake.decode(picture, name, mode=colours, fitted=fitted, then=then))
    arguments: dict[str, Any] = {}
    if size is not None and task.takes("width") and task.takes("height"):
        arguments |= {"width": size[0], "height": size[1]}
    if is_sized and _starts_from_pixels(task) and not task.takes("width"):
        rule = "this model draws in the picture's own size, leave it out"
        raise errors.UnsupportedParameter(f"size: {rule}", param="size")
    if mask is not None:
        if isinstance(mask, bytes) and not mask.startswith(b"\x89PNG"):
            raise errors.UnsupportedImage("mask cannot be read: it must be a PNG", param="mask")
        picture = await intake.open(mask, "mask")
        if picture.size != original:
            problem = f"mask has {_by(picture.size)} pixels, and {name} {_by(original)}"
            raise errors.MaskMismatch(f"{problem}: both must have the same size", param="mask")
        then = partial(_white_mask, size=images[0].size)
        arguments["mask_image"] = await intake.decode(picture, "mask", mode="RGBA", then=then)
    return {**arguments, "image": images[0] if len(images) == 1 else images}


async def reference_images(
    card: Card, form: Form, body: GenerationRequest, intake: ImageIntake
) -> dict[str, Any]:
    """Read the first picture of a video or mesh, if any; as `edit_images`."""
    if (task := card.task_for(["image"])).makes not in ("videos", "meshes"):
        return {}  # the parameter check refuses it
    if not form.images:
        if any(parameter.name == "image" and parameter.required for parameter in card.parameters):
            rule = f"{card.id} does {card.tasks[0].name}: send the picture as a file"
            raise errors.MissingParameter(f"{REFERENCE} is missing: {rule}", param=REFERENCE)
        return {}
    if not task.takes("image"):
        does = ", ".join(task.name for task in card.tasks)
        problem = f"{REFERENCE} is not supported: {card.id} does {does}, leave it out"
        raise errors.UnsupportedParameter(problem, param=REFERENCE)
    return await edit_images(card, task, form, body, intake)


def _result_size(card: Card, task: Task, original: Size, name: str) -> Size | None:
    """Size of a result that starts from a picture's own pixels; None for other results.

    A video is at most as large as its model's default.
    """
    if not _starts_from_pixels(task):
        return None
    max_pixels = card.max_pixels
    defaults = {parameter.name: parameter.default for parameter in task.parameters} | card.defaults
    width, height = defaults.get("width"), defaults.get("height")
    if task.makes == "videos" and isinstance(width, int) and isinstance(height, int):
        max_pixels = min(max_pixels, width * height)
    size = within(original, max_pixels, card.size_multiple_px)
    if math.prod(size) > max_pixels:  # a side was too short, and was raised to the minimum
        raise errors.UnsupportedImage(
            f"{name} has {_by(original)} pixels: too long for this model, whose sides are "
            f"multiples of {card.size_multiple_px} and make at most {max_pixels} pixels: cut it",
            param=name,
        )
    return size


def _starts_from_pixels(task: Task) -> bool:
    """Return whether the result starts from the picture's own pixels, in the same size."""
    return task.takes("strength") or (task.makes == "videos" and task.takes("width"))


def _ready(image: Any, size: Size | None, *, is_flattened: bool) -> Any:
    image = image if size is None else _resized(image, size)
    return on_white(image) if is_flattened else image


def _resized(image: Any, size: Size) -> Any:
    return image if image.size == size else image.resize(size)


def _white_mask(image: Any, size: Size) -> Any:
    """Convert an OpenAI mask: its transparent pixels become white, to be redrawn."""
    alpha = image.getchannel("A")
    if alpha.getextrema()[0] == 255:
        rule = "the parts to redraw must be transparent, and none are"
        raise errors.MaskMismatch(f"mask marks nothing: {rule}", param="mask")
    return _resized(alpha.point(lambda value: 255 - value), size)


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
