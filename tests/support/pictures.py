"""Pictures for tests: made, encoded, decoded and compared."""

import io
import json
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageChops

ALIKE = 1  # of 255: company moves the last bits of floats, which tips a value here and there


def picture(encoded: bytes) -> Image.Image:
    with Image.open(io.BytesIO(encoded)) as image:
        image.load()
        return image


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).astype(np.int64))


def read_settings(png: bytes) -> dict[str, Any]:
    """The settings that a PNG of ours carries; empty for any other picture."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        text = getattr(image, "text", {}).get("carpool", "{}")
    settings: dict[str, Any] = json.loads(text)
    return settings


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def png(width: int = 64, height: int = 64, *, seed: int = 0, mode: str = "RGB") -> bytes:
    """A picture of noise."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 255, (height, width, len(mode)), np.uint8)
    return saved(Image.fromarray(pixels, mode))


def mask(width: int = 64, height: int = 64) -> bytes:
    """Transparent, so to be drawn anew, in its right half."""
    image = Image.new("RGBA", (width, height), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (width // 2, 0, width, height))
    return saved(image)


def gap(left: Image.Image, right: Image.Image) -> int:
    """The largest difference between two pictures, 0-255."""
    assert (left.size, left.mode) == (right.size, right.mode)
    bands = ImageChops.difference(left, right).getextrema()
    return max(int(high) for _, high in bands)  # type: ignore[misc]
