"""Progress bars on standard error, one for each picture, with previews below."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from carpool.cli.show import blocks

if TYPE_CHECKING:
    from PIL import Image
    from rich.table import Table

MOST_SHOWN = 12
"""Most bars; with more pictures, only running pictures have a bar."""

PREVIEW_WIDTH = 24  # columns
MOST_PREVIEWS = 4  # previews side by side; more are not shown

AdvanceBar = Callable[[int, float], None]
"""Moves a bar: index, and progress from 0 to 1. Thread-safe."""


class Previews(dict[int, "Image.Image"]):
    """Previews of running pictures, by index. Thread-safe.

    They are half blocks in every terminal: text can be overwritten at each step.
    """

    def table(self, columns: int) -> "Table":
        """Previews side by side, as many as fit into `columns`."""
        from rich.console import Group
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        columns_max = max(1, min(MOST_PREVIEWS, columns // (PREVIEW_WIDTH + 1)))
        pictures = [picture for _, picture in sorted(dict(self).items())][:columns_max]
        for _ in pictures:
            grid.add_column(width=PREVIEW_WIDTH)
        if pictures:
            grid.add_row(*(Group(*blocks(picture, PREVIEW_WIDTH)) for picture in pictures))
        return grid


@contextmanager
def bars(
    names: Sequence[str], previews: Previews | None = None, *, are_shown: bool | None = None
) -> Iterator[AdvanceBar]:
    """A bar for each name, and a total bar if there are several.

    Args:
        previews: shown below the bars until their picture is done.
        are_shown: default: whether standard error is a terminal.
    """
    if not (sys.stderr.isatty() if are_shown is None else are_shown):
        yield lambda place, share: None
        return
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    class WithPreviews(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            yield from super().get_renderables()
            if previews is not None:
                yield previews.table(console.width)

    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with WithPreviews(*columns, console=console) as progress:
        count, lock = len(names), threading.Lock()
        every = progress.add_task(_all(0, count), total=count or 1, visible=count > 1)
        are_few = count <= MOST_SHOWN
        tasks = [
            progress.add_task(text, total=1.0, start=False, visible=are_few)
            for text in (name if len(name) <= 48 else f"{name[:47]}…" for name in names)
        ]

        def move(place: int, share: float) -> None:
            task = tasks[place]
            with lock:
                progress.start_task(task)
                progress.update(task, completed=share, visible=share < 1 or are_few)
                if share >= 1:
                    if previews is not None:
                        previews.pop(place, None)
                    progress.stop_task(task)
                    so_far = sum(other.finished for other in progress.tasks if other.id != every)
                    progress.update(every, completed=so_far, description=_all(so_far, count))

        yield move


def _all(count: int, total: int) -> str:
    return f"{count} of {total} done"
