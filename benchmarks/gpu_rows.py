"""Part *rows*: seconds of one forward of the denoiser by its rows, without an engine; and the knee.

*Knee*: the narrowest forward with nearly the maximum of rows a second. *Of the ceiling*: counted
operations a second, relative to the machine's largest matrix product.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_build import Built, Rig, denoiser_call, operations
from benchmarks.gpu_models import MODELS, Size
from benchmarks.gpu_records import Rows
from carpool.engine.fuse import Fuser

WIDTHS = (1, 2, 3, 4, 6, 8)  # the default cap is 8
KNEE = 0.95  # fraction of the maximum: wider forwards gain little
PATIENCE_S = 20.0  # limit for measuring a width


def measure(
    rig: Rig, rows: Rows, prepare: Callable[[Built], None] = lambda _: None, code: str = "eager"
) -> None:
    tflops = rig.tflops()
    for name in MODELS:
        model = rig.model(name)
        labels = [(size, f"{model.title} {size} {code}") for size in model.sizes]
        if rows.left_s <= 0 or all(rows.has(label) for _, label in labels):
            continue
        with rig.built(name) as subject:
            prepare(subject)
            for size, label in labels:
                rows.measure(label, partial(_curve, subject, size, tflops), needs_s=15)


def _curve(subject: Built, size: Size, tflops: float) -> Mapping[str, Any]:
    tflop = operations(subject.model, size) / 1e12
    seconds = forwards_s(subject, size, WIDTHS[:2] if subject.rig.is_tiny else WIDTHS)
    knee_rows = knee(seconds)
    return {
        "TFLOP a row": round(tflop, 2),
        **{f"{width} ms": round(1e3 * took_s, 3) for width, took_s in seconds.items()},
        "knee": knee_rows,
        "rows/s there, of 1": knee_rows * seconds[1] / seconds[knee_rows],
        "of the ceiling at 1": f"{tflop / seconds[1] / tflops:.0%}",
        "there": f"{tflop * knee_rows / seconds[knee_rows] / tflops:.0%}",
        "peak GiB": subject.rig.marks.peak_gib(),
    }


def forwards_s(subject: Built, size: Size, widths: tuple[int, ...]) -> dict[int, float]:
    """Seconds by rows: a request's first call, fused with copies of itself as in the engine."""
    fuser, marks = Fuser(), subject.rig.marks
    call = denoiser_call(subject.pipe, subject.model, subject.request(size, 2, is_guided=False))
    assert fuser.describe(call)[1] == 1, "without guidance a step is one row"
    seconds: dict[int, float] = {}
    marks.peak_gib()
    for width in widths:
        if seconds and 8 * max(seconds.values()) > PATIENCE_S:
            break
        try:
            seconds[width] = marks.seconds(partial(fuser.run, [call] * width, [1] * width))
        except torch.OutOfMemoryError:
            break
    return seconds


def knee(seconds: Mapping[int, float]) -> int:
    """The narrowest width with nearly the maximum of rows a second."""
    top = max(width / took_s for width, took_s in seconds.items())
    return min(width for width, took_s in seconds.items() if width / took_s >= KNEE * top)
