"""Sweeps as pictures, measured and simulated."""

from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.errors import LibraryMissing
from carpool_lab.load.sweep import Point, Swept
from carpool_lab.simulate.report import Point as Simulated

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
except ImportError as error:
    message = "the picture of a sweep needs matplotlib: pip install 'carpool[bench]'"
    raise LibraryMissing(message) from error

_PANELS: tuple[tuple[str, Callable[[Point], float | None], str], ...] = (
    ("Latency Mean (s)", lambda point: point.summary.latency_mean, "log"),
    ("Latency P99 (s)", lambda point: point.summary.latency_p99, "log"),
    ("Request goodput (req/s)", lambda point: point.summary.goodput_qps, "linear"),
)
_SIMULATED: tuple[tuple[str, Callable[[Simulated], float], str], ...] = (
    ("Latency Mean (s)", lambda point: point.numbers.latency.mean_s, "log"),
    ("Latency P99 (s)", lambda point: point.numbers.latency.p99_s, "log"),
    ("Requests in time", lambda point: point.numbers.slo_attainment, "linear"),
)


def draw(swept: Swept, path: Path) -> None:
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


def draw_points(rows: Sequence[tuple[str, Sequence[Simulated]]], path: Path) -> None:
    """Write mean latency, p99 and goodput over load as they were simulated, a line for each mode.

    Args:
        rows: a title and the points of each row of panels.
        path: ends in .png, or in another format of matplotlib's.
    """
    figure = Figure(figsize=(13, 3.6 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(_SIMULATED), squeeze=False)
    for (title, points), panels in zip(rows, grid, strict=True):
        for axes, (name, value, scale) in zip(panels, _SIMULATED, strict=True):
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
