"""The limit of pixels at run time: a pipeline may draw larger images than the request states.

A pipeline may keep its own area in the requested shape, enlarge its input images, or draw in the
nearest of a few sizes. So each call is measured before it runs: encoded images, denoised latents,
and decoded latents. Latents of an unknown layout are measured from below: no request within the
limit is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from carpool.engine.intercept import Call
from carpool.errors import SizeRejected
from carpool.request.card import Card, Task

_SCALES = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
_SIZING = ("width", "height", "max_area", "resolution", "use_resolution_binning", "_auto_resize")
"""Parameters that affect the size of a pipeline's output, for the error message."""


class PixelLimit:
    """Measures the calls of one request.

    Args:
        pipe: the request's own view of the pipeline.
    """

    def __init__(self, pipe: Any, card: Card, task: Task) -> None:
        self._task, self._max_pixels = task, card.max_pixels
        self._scale_px = _scale_of(pipe)
        self._token_px = card.size_multiple_px**2  # packed latents, patches included
        self._makes_sound = task.makes == "sound"
        self._encoded_px = 0  # input images that may be among the packed latents
        self._measured: Any = None  # target and shape of the last call within the limit

    def check(self, call: Call) -> None:
        """Raise SizeRejected if a call has more pixels than the limit, or none."""
        target = call.target
        if self._makes_sound or "audio" in target.component:
            return
        name = target.spec.rows if target.spec is not None else target.positional[:1]
        name = name if isinstance(name, str) else "".join(name)
        first = call.kwargs.get(name, call.args[0] if call.args else None)
        if isinstance(first, (list, tuple)) and first and isinstance(first[0], Tensor):
            first = first[0][None]
        if not isinstance(first, Tensor):
            return
        measured = target.component, target.method, first.shape
        if measured == self._measured and target.method == "forward":
            return  # common case: the next step
        if (pixels := self._pixels(call, first)) is not None:
            self._refuse(pixels, target.method)
        self._measured = measured

    def _pixels(self, call: Call, first: Tensor) -> int | None:
        """The pixels of an image, or of a frame, in a call; None: unknown."""
        target = call.target
        if target.method == "encode" and target.phase == "encode":
            pixels = _area(first)
            if pixels is not None:
                self._encoded_px += first.shape[0] * pixels
            return pixels
        if target.phase == "decode":
            scale_px = min(self._scale_px, _ratio_of(target.module) or self._scale_px)
            area = _area(first) if target.method == "decode" else None
            return None if area is None else area * scale_px**2
        if target.phase == "denoise":
            return self._denoised(call, first)
        return None

    def _denoised(self, call: Call, first: Tensor) -> int | None:
        if (area := _area(first, getattr(call.target.module, "config", {}))) is not None:
            return area * self._scale_px**2
        if first.ndim != 3:
            return None
        arguments = call.arguments()
        height, width = arguments.get("height"), arguments.get("width")
        if isinstance(height, int) and isinstance(width, int):
            return height * width * self._scale_px**2
        if shapes := arguments.get("img_shapes"):  # [[(layers, rows, columns), ...], ...]
            rows = [[row] if row and isinstance(row[0], int) else row for row in shapes]
            areas = [height * width for row in rows for _, height, width in row]
            return max(areas, default=0) * self._token_px
        places = arguments.get("img_ids")
        if isinstance(places, Tensor):  # (..., positions, axes): the image's, then inputs'
            pixels = min(first.shape[1], places.shape[-2]) * self._token_px
            return pixels if pixels <= self._encoded_px else pixels - self._encoded_px
        return None

    def _refuse(self, pixels: int, method: str) -> None:
        if 0 < pixels <= self._max_pixels:
            return
        names = [name for name in _SIZING if self._task.takes(name)]
        does = "reads a picture as" if method == "encode" else "draws"
        message = f"{self._task.pipeline} {does} {pixels} pixels for this request"
        rule = f"must be from 1 to {self._max_pixels}"
        hint = f"; {', '.join(names)} decide it" if names else ""
        raise SizeRejected(f"{message}: {rule}{hint}", param="size")


def _area(value: Tensor, config: Any = None) -> int | None:
    """Rows times columns of (..., channels, rows, columns), or channels last."""
    if value.ndim < 4:
        return None
    *_, before, rows, columns = value.shape
    channels = config.get("in_channels") if isinstance(config, Mapping) else None
    is_last = columns == channels and channels not in (before, value.shape[1])
    return int(before * rows if is_last else rows * columns)


def _scale_of(pipe: Any) -> int:
    """Pixels along a side of one latent; 1 for a pipeline in pixel space."""
    scales = (getattr(pipe, name, None) for name in _SCALES)
    return next((scale for scale in scales if isinstance(scale, int) and scale > 0), 1)


def _ratio_of(module: nn.Module) -> int | None:
    """Pixels along a side of one latent of an autoencoder; None: unknown."""
    config = getattr(module, "config", {})
    name = "spatial_compression_ratio"
    ratio = config[name] if name in config else getattr(module, name, None)
    if isinstance(ratio, (int, float)) and ratio >= 1:
        return math.floor(ratio)
    blocks = config.get("block_out_channels")
    return 2 ** (len(blocks) - 1) if isinstance(blocks, (list, tuple)) and blocks else None
