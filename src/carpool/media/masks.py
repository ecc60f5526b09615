"""Masks as pipelines take them: white where to draw anew."""

from PIL import Image, ImageChops, ImageFilter


def fitted(
    mask: Image.Image, *, size: tuple[int, int], blur: float = 0, is_inverted: bool = False
) -> Image.Image:
    """A mask of a picture. Slow: call it on a thread.

    Args:
        mask: of mode "L".
        size: of the picture, pixels.
        blur: radius, pixels.
        is_inverted: is it black where to draw anew?
    """
    mask = mask if mask.size == size else mask.resize(size)
    mask = ImageChops.invert(mask) if is_inverted else mask
    return mask.filter(ImageFilter.GaussianBlur(blur)) if blur else mask
