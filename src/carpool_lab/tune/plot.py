"""The plot of `carpool tune`."""

from pathlib import Path

from carpool.errors import LibraryMissing
from carpool_lab.tune.results import TuneReport

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator
except ImportError as error:
    message = "the picture of the curves needs matplotlib: pip install matplotlib"
    raise LibraryMissing(message) from error


def draw_curves(tuned: TuneReport, path: Path) -> None:
    """Write milliseconds and rows a second over rows: a column a component, a line a size.

    A ring is the knee; a cross stands at the rows that did not fit the memory.

    Args:
        path: ends in .png, or in another format of matplotlib's.
    """
    names = list(dict.fromkeys(c.kind.name for size in tuned.sizes for c in size.components))
    figure = Figure(figsize=(3.6 * max(1, len(names)), 6.2), layout="constrained")
    figure.suptitle(f"{tuned.model} on {tuned.device}, {tuned.dtype}")
    grid = figure.subplots(2, max(1, len(names)), squeeze=False)
    for column, name in enumerate(names):
        above, below = grid[0][column], grid[1][column]
        ticks: set[int] = set()
        for size, marker in zip(tuned.sizes, "osD^v*" * len(tuned.sizes), strict=False):
            for one in size.components:
                if one.kind.name != name:
                    continue
                widths, bend = list(one.seconds), one.knee(tuned.min_gain)
                ms = {rows: seconds * 1000 for rows, seconds in one.seconds.items()}
                rate = {rows: rows / seconds for rows, seconds in one.seconds.items()}
                for axes, values in ((above, ms), (below, rate)):
                    [line] = axes.plot(
                        widths, list(values.values()), marker=marker, markersize=4, label=size.name
                    )
                    axes.plot(
                        bend, values[bend], "o", color=line.get_color(), fillstyle="none",
                        markersize=12,
                    )  # fmt: skip
                    if one.too_wide:
                        axes.plot(one.too_wide, 0, "x", color=line.get_color(), clip_on=False)
                ticks |= {*widths, one.too_wide or widths[0]}
        above.set(title=name, ylabel="" if column else "ms")
        below.set(xlabel="rows", ylabel="" if column else "rows/s")
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.25)
    if names:
        grid[0][0].legend()
    figure.savefig(path, dpi=110)
