"""Plots of batching modes over load, measured or simulated."""

from collections.abc import Sequence
from pathlib import Path

from carpool.errors import LibraryMissing

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
except ImportError as error:
    message = "the plot needs matplotlib: pip install matplotlib"
    raise LibraryMissing(message) from error

_PANELS = (("Latency Mean (s)", "log"), ("Latency P99 (s)", "log"), ("Requests in time", "linear"))

PlotPoint = tuple[str, float, Sequence[float | None]]
"""A mode, a load (fraction of the capacity), and a value for each panel; None: it is unknown."""


def draw(rows: Sequence[tuple[str, Sequence[PlotPoint]]], path: Path) -> None:
    """Plot mean latency, p99 and requests in time over load, with a line for each mode.

    Args:
        rows: a title and the points of each row of panels.
        path: ends in .png, or in another format of matplotlib's.
    """
    figure = Figure(figsize=(13, 3.6 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(_PANELS), squeeze=False)
    for (title, points), panels in zip(rows, grid, strict=True):
        for place, (axes, (name, scale)) in enumerate(zip(panels, _PANELS, strict=True)):
            for mode, marker in zip(
                dict.fromkeys(mode for mode, *_ in points), "osD^", strict=False
            ):
                line = [(load, values[place]) for its, load, values in points if its == mode]
                line = [(load, value) for load, value in line if value is not None]
                axes.plot([x for x, _ in line], [y for _, y in line], marker=marker, label=mode)
            axes.set(title=name, xlabel="load", xscale="log", yscale=scale)
            axes.xaxis.set_major_locator(FixedLocator(sorted({load for _, load, _ in points})))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
            if scale == "log":
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(visible=True, which="both", alpha=0.25)
        panels[0].set_ylabel(title)
        panels[-1].legend()
    figure.savefig(path, dpi=90)
