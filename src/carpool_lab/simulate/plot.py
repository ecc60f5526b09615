"""Plots of simulated points."""

from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.errors import LibraryMissing
from carpool_lab.simulate.report import Point

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
except ImportError as error:
    message = "the picture of a simulation needs matplotlib: pip install matplotlib"
    raise LibraryMissing(message) from error

_PANELS: tuple[tuple[str, Callable[[Point], float], str], ...] = (
    ("Latency Mean (s)", lambda point: point.numbers.latency.mean_s, "log"),
    ("Latency P99 (s)", lambda point: point.numbers.latency.p99_s, "log"),
    ("Requests in time", lambda point: point.numbers.slo_attainment, "linear"),
)


def draw_points(rows: Sequence[tuple[str, Sequence[Point]]], path: Path) -> None:
    """Plot simulated mean latency, p99 and goodput over load, with a line for each mode.

    Args:
        rows: a title and the points of each row of panels.
        path: ends in .png, or in another format of matplotlib's.
    """
    figure = Figure(figsize=(13, 3.6 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(_PANELS), squeeze=False)
    for (title, points), panels in zip(rows, grid, strict=True):
        for axes, (name, value, scale) in zip(panels, _PANELS, strict=True):
            for mode, marker in zip(dict.fromkeys(p.mode for p in points), "osD^", strict=False):
                line = [point for point in points if point.mode == mode]
                loads, values = [p.load for p in line], [value(p) for p in line]
                axes.plot(loads, values, marker=marker, label=mode)
            axes.set(title=name, xlabel="load", xscale="log", yscale=scale)
            axes.xaxis.set_major_locator(FixedLocator(sorted({point.load for point in points})))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
            if scale == "log":
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(visible=True, which="both", alpha=0.25)
        panels[0].set_ylabel(title)
        panels[-1].legend()
    figure.savefig(path, dpi=90)
