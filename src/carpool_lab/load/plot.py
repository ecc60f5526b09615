"""Plots of measured sweeps."""

from collections.abc import Callable
from pathlib import Path

from carpool.errors import LibraryMissing
from carpool_lab.load.sweep import SweepPoint, SweepReport

try:
    from matplotlib.figure import Figure
except ImportError as error:
    message = "the picture of a sweep needs matplotlib: pip install matplotlib"
    raise LibraryMissing(message) from error

_PANELS: tuple[tuple[str, Callable[[SweepPoint], float | None], str], ...] = (
    ("Latency Mean (s)", lambda point: point.summary.latency_mean, "log"),
    ("Latency P99 (s)", lambda point: point.summary.latency_p99, "log"),
    ("Request goodput (req/s)", lambda point: point.summary.goodput_qps, "linear"),
)


def draw(swept: SweepReport, path: Path) -> None:
    """Write latency and goodput over load, a line for each mode.

    Args:
        path: ends in .png, or in another format of matplotlib's.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    figure.suptitle(f"{swept.model}: load 1 is {swept.capacity_qps:.3g} req/s")
    for axes, (title, value, scale) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for mode, marker in zip(
            dict.fromkeys(p.mode for p in swept.points), "osD^v*", strict=False
        ):
            points = [p for p in swept.points if p.mode == mode and value(p) is not None]
            loads = [point.load for point in points]
            axes.plot(loads, [value(point) for point in points], marker=marker, label=mode)
        axes.set(title=title, xlabel="load", yscale=scale)
        if scale == "log":  # 0.5, not 5 x 10^-1
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=120)
