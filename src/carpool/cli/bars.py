"""Progress bars on standard error, one for each picture."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

MOST_SHOWN = 12
"""Bars at once; of more pictures only those that are being drawn have one."""

Move = Callable[[int, float], None]
"""Moves one bar: its place, and how much is done, from 0 to 1. From any thread."""


@contextmanager
def bars(names: Sequence[str], *, are_shown: bool | None = None) -> Iterator[Move]:
    """A bar for each name, and one for all where there are several.

    Args:
        are_shown: default: if standard error is a terminal.
    """
    if not (sys.stderr.isatty() if are_shown is None else are_shown):
        yield lambda place, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        count, lock = len(names), threading.Lock()
        every = progress.add_task(_all(0, count), total=count or 1, visible=count > 1)
        are_few = count <= MOST_SHOWN
        tasks = [
            progress.add_task(_short(name), total=1.0, start=False, visible=are_few)
            for name in names
        ]
        begun, ended = set[int](), set[int]()

        def move(place: int, done: float) -> None:
            with lock:
                if place not in begun:
                    begun.add(place)
                    progress.start_task(tasks[place])
                    progress.update(tasks[place], visible=True)
                progress.update(tasks[place], completed=done)
                if done >= 1 and place not in ended:
                    ended.add(place)
                    progress.stop_task(tasks[place])
                    progress.update(tasks[place], visible=are_few)
                    so_far = len(ended)
                    progress.update(every, completed=so_far, description=_all(so_far, count))

        yield move


def _all(count: int, most: int) -> str:
    return f"{count} of {most} done"


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:47]}…"
