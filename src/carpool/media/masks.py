"""Masks in the format of pipelines (white: redraw), and the pictures that belong to them.

Source: AUTOMATIC1111's web interface. These functions reproduce its mask channel, the order of its
steps, and its fill colours.
"""

from PIL import Image, ImageChops, ImageFilter

_FILLS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1))  # radius in pixels, number of layers
_MIDDLE = 128  # the largest alpha that counts as transparent


def fitted(
    mask: Image.Image,
    *,
    size: tuple[int, int],
    blur: tuple[float, float] = (0, 0),
    is_inverted: bool = False,
    is_rounded: bool = True,
) -> Image.Image:
    """Make the mask for a picture. Slow: call it on a thread.

    Args:
        mask: mode "L", or "RGBA" with the mask in alpha, unless it is fully opaque.
        size: size of the picture, pixels.
        blur: radius in x and y, in pixels of the mask.
        is_inverted: the mask is black where to redraw.
        is_rounded: round alpha to black or white.
    """
    if mask.mode == "RGBA":
        alpha = mask.getchannel("A")
        if alpha.getextrema()[0] == 255:
            mask = mask.convert("L")
        else:
            mask = alpha.point(lambda value: 255 * (value > _MIDDLE)) if is_rounded else alpha
    mask = ImageChops.invert(mask) if is_inverted else mask
    mask = mask.filter(ImageFilter.GaussianBlur(blur)) if any(blur) else mask
    return mask if mask.size == size else mask.resize(size)


def on_white(image: Image.Image) -> Image.Image:
    """Flatten a picture of mode "RGBA" on a white background."""
    background = Image.new("RGBA", image.size, "white")
    background.alpha_composite(image)
    return background.convert("RGB")


def filled(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Fill the masked parts with the colours around them. Slow: call it on a thread."""
    outside = Image.new("RGBa", image.size)
    outside.paste(image.convert("RGBA").convert("RGBa"), mask=ImageChops.invert(mask))
    result = Image.new("RGBA", image.size)
    for radius, layers in _FILLS:
        blurred = outside.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(layers):
            result.alpha_composite(blurred)
    return result.convert("RGB")
