"""Rows of a part of `gpu_page`: each is stored on the disk at once, as a line of JSON.

A row with only a start line was ended by a crash, or by the part's time limit. A part that runs
again measures what it lacks; a row that has failed or crashed has a second try.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Cells = Mapping[str, Any]
TRIES = 2  # of a row, so that one that always crashes does not keep others from their turn


class Rows:
    """The rows of one part, measured until its time limit.

    Args:
        file: file of lines; its rows are not measured again.
        ends_s: latest start of a row, monotonic clock.
    """

    def __init__(self, file: Path, ends_s: float) -> None:
        self._file, self._ends_s = file, ends_s
        lines = read(file)
        began = Counter(line["row"] for line in lines if line["state"] == "began")
        self._rows = {line["row"] for line in lines if line["state"] == "measured"}
        self._rows |= {row for row, tries in began.items() if tries >= TRIES}

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def has(self, name: str) -> bool:
        """Return whether a row was measured, or has failed for good."""
        return name in self._rows

    def measure(
        self, name: str, work: Callable[[], Cells | Sequence[Cells]], *, needs_s: float = 0.0
    ) -> None:
        """Measure a row, unless it exists or too little time remains.

        Args:
            work: returns its cells, or the cells of several rows.
            needs_s: estimated duration, if known.
        """
        if name in self._rows:
            return
        if self.left_s <= needs_s:
            why = f"{max(0.0, self.left_s):.0f} s were left, it needs about {needs_s:.0f} s"
            self.write(name, "left out", {"why": why})
            return
        self.write(name, "began", {})
        began_s = time.monotonic()
        try:
            cells = work()
        except Exception as error:  # the next row may succeed
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self.write(name, "failed", {"why": why[:300]})
            return
        for row in [cells] if isinstance(cells, Mapping) else cells:
            self.write(name, "measured", {**row, "took s": round(time.monotonic() - began_s, 1)})

    def write(self, name: str, state: str, cells: Cells) -> None:
        line = {"row": name, "state": state, "cells": cells}
        print(json.dumps(line), flush=True)
        append(self._file, line)


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Append a line; if the disk is full, it is only on the screen."""
    try:
        with file.open("a") as lines:
            lines.write(f"\n{json.dumps(line)}\n")  # after a line that a crash cut off, too
    except OSError as error:
        print(f"{file} cannot be written: {error}", flush=True)


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, without a truncated last line."""
    lines = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def outcome(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The result of each row: its cells if it was measured, otherwise its last state."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        group = by_row.setdefault(line["row"], [])
        is_more = line["state"] == "measured" and group and group[-1]["state"] == "measured"
        if not group or is_more:
            group.append(line)
        elif group[-1]["state"] != "measured":
            by_row[line["row"]] = [line]
    return [line for lines in by_row.values() for line in lines]
