"""Checks of the pictures in a request, before it is queued.

A pipeline would stretch, crop or misread an unsuitable picture, or fail in the middle. Pictures are
recognised by attributes (`mode` and `size`, or `shape`), so this module imports neither Pillow nor
torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.errors import InvalidValue, MaskMismatch, MissingParameter, named

PICTURES = ("image", "control_image", "ip_adapter_image", "last_image", "image_reference")
MASKS = ("mask_image", "control_mask")
NAMES = (*PICTURES, *MASKS)
ORIENTATION = 0x0112  # the EXIF tag; 1 means upright

Size = tuple[int, int]  # width, height


def check_pictures(
    arguments: Mapping[str, Any],
    *,
    mode: str,
    max_images: int,
    least_px: int,
    max_pixels: int,
    takes_image: bool = True,
) -> None:
    """Refuse pictures that the pipeline cannot use unchanged.

    Args:
        arguments: arguments of the pipeline's `__call__`; each picture is a PIL image, a tensor
            (C, H, W) or (1, C, H, W), an array with a batch of one (1, H, W, C), or a list of them.
        mode: mode of PIL images for the model: "RGB" or "RGBA".
        max_images: most reference images of the pipeline.
        least_px: minimum of each side.
        max_pixels: limit for width times height.
        takes_image: a mask needs a picture; False for DiffEdit, whose mask needs latents.

    Raises:
        InvalidValue, MissingParameter: the message has the value and the rule.
    """
    for name in NAMES:
        value = arguments.get(name)
        if value is None:
            continue
        pictures = list(value) if isinstance(value, (list, tuple)) else [value]
        limit = max_images if name == "image" else max(max_images, 1)
        if any(isinstance(picture, (list, tuple)) for picture in pictures):
            limit = len(pictures)  # groups: the pipeline checks their number
        if not 1 <= len(pictures) <= limit and name not in ("ip_adapter_image", "control_image"):
            raise InvalidValue(
                f"{name} is a list of {len(pictures)}: this model takes "
                + ("one" if limit == 1 else f"from 1 to {limit}"),
                param=name,
            )
        for picture in pictures:
            modes = (mode,) if name in PICTURES else ("L", "1", mode)
            _check_one(name, picture, modes, least_px, max_pixels)
    _check_mask(arguments, takes_image)


def _check_one(
    name: str, picture: Any, modes: Sequence[str], least_px: int, max_pixels: int
) -> None:
    if isinstance(picture, (list, tuple)):  # IP-Adapters: a list for each adapter
        for part in picture:
            if part is not None:  # None is the gap in VisualCloze's grid of examples
                _check_one(name, part, modes, least_px, max_pixels)
        return
    size = size_of(picture)
    if size is None:
        kind = type(picture).__name__
        problem = f"is a {kind}: give a PIL image or a tensor, opened from its file"
    elif min(size) < least_px or size[0] * size[1] > max_pixels:
        rule = f"each side must have at least {least_px}, and the whole at most {max_pixels} pixels"
        problem = f"has {size[0]}x{size[1]} pixels: {rule}"
    elif not is_pil(picture):
        return
    elif picture.mode not in modes:
        rule = f"must be {' or '.join(modes)}; {name}.convert({modes[0]!r}) gives that"
        problem = f"has mode {picture.mode}: {rule}"
    elif damage := _damage(picture):
        problem = f"cannot be read: {damage}"
    elif (turned := picture.getexif().get(ORIENTATION, 1)) != 1:
        rule = "must be upright; PIL.ImageOps.exif_transpose turns it"
        problem = f"is stored turned (EXIF orientation {turned}): {rule}"
    else:
        return
    raise InvalidValue(f"{name} {problem}", param=name)


def _damage(picture: Any) -> str:
    """Why Pillow cannot read the rest of a picture's file; "" if it can."""
    try:
        picture.load()
    except Exception as error:  # each format raises its own
        return named(error)
    return ""


def _check_mask(arguments: Mapping[str, Any], takes_image: bool) -> None:
    for name in MASKS:
        value = arguments.get(name)
        masks = value if isinstance(value, (list, tuple)) else [value]
        if value is not None and not any(map(_marks, masks)):
            rule = "the parts to redraw must be white, and none are"
            raise MaskMismatch(f"{name} marks nothing: {rule}", param=name)
    mask = arguments.get("mask_image")
    if mask is None or not takes_image:
        return
    image = arguments.get("image")
    if image is None:
        raise MissingParameter("image is missing: mask_image says which part of it", param="image")
    of_mask, of_image = size_of(_first(mask)), size_of(_first(image))
    if of_mask is None or of_image is None:
        return
    # pipelines resize the mask to the picture
    if of_mask[0] * of_image[1] != of_mask[1] * of_image[0]:
        raise InvalidValue(
            f"mask_image has {of_mask[0]}x{of_mask[1]} pixels, and image {of_image[0]}x"
            f"{of_image[1]}: both must have the same size, or sides in the same proportion",
            param="mask_image",
        )


def _marks(mask: Any) -> bool:
    """Return whether any pixel of a mask is not black."""
    if is_pil(mask):
        return bool(mask.convert("L").getbbox())
    return bool((mask != 0).any())


def size_of(picture: Any) -> Size | None:
    """Width and height of a PIL image, tensor or array; None for anything else."""
    if is_pil(picture):
        width, height = picture.size
        return int(width), int(height)
    shape = getattr(picture, "shape", None)
    if shape is None or not 2 <= len(shape) <= 5:
        return None
    is_array = type(picture).__module__ == "numpy"  # (H, W, C), diffusers' convention
    if is_array and len(shape) > 2:
        return int(shape[-2]), int(shape[-3])
    return int(shape[-1]), int(shape[-2])


def is_pil(picture: Any) -> bool:
    """Return whether a value is a PIL image."""
    return isinstance(getattr(picture, "mode", None), str)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value
