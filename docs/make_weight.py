"""Write weight.md: lines of code of each mechanism of a room, and its benefit for users.

The mechanisms are in weight.toml, a list for each room; the lines are counted.

usage: make docs     (or: python docs/make_weight.py)
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "weight.md"
ROOMS: dict[str, Any] = tomllib.loads((ROOT / "docs" / "weight.toml").read_text())

INTRODUCTION = """\
`docs/make_weight.py` writes this page from `docs/weight.toml`, for people who change Carpool. Each
room has a budget of lines (`tests/test_budgets.py`). The tables show what users would lose without
each mechanism, so that one that gives too little for its lines can go. A file in two rooms belongs
to the deeper folder."""


def files_of(room: str, mechanism: dict[str, Any]) -> list[Path]:
    """The files of a mechanism, from patterns in the room's folder."""
    folder = ROOT / ROOMS[room]["folder"]
    return sorted({file for pattern in mechanism["files"] for file in folder.glob(pattern)})


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def page() -> Iterator[str]:
    yield "# What the code weighs\n"
    yield INTRODUCTION
    for room, about in ROOMS.items():
        rows = [(lines(files_of(room, entry)), entry) for entry in about["mechanisms"]]
        total = sum(count for count, _ in rows)
        yield f"\n## {room.capitalize()}\n"
        yield f"{total:,} lines; the budget is {about['budget']:,}.\n"
        yield "| lines | mechanism | without it |"
        yield "| ---: | --- | --- |"
        for count, entry in sorted(rows, key=lambda row: -row[0]):
            yield f"| {count:,} | {entry['name']} | {entry['lost']} |"


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()) + "\n")
