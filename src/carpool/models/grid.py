"""The grid: the model families that Carpool is proven with, their tasks, what fuses, their limits.

`grid.json` lists the families. Each names rows of the differential matrix (`tests/support/matrix`):
a row is one task of a tiny checkpoint of the same pipeline class, whose requests ran together and
got the outputs of plain diffusers. `make test-models` writes the results to `proof.json`. Other
diffusers pipelines run too.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FAMILIES = Path(__file__).parent / "grid.json"
PROOF = Path(__file__).parent / "proof.json"


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the grid."""

    family: str
    hub_ids: list[str]  # example ids on the Hugging Face hub
    cases: tuple[str, ...] = ()  # rows of the matrix that prove it; empty: not runnable
    limits: str = ""
    mixed_sizes: bool = False  # requests of different sizes share forwards
    lora: bool = True  # diffusers loads adapters for it


@cache
def families() -> tuple[Family, ...]:
    """The families of `grid.json`, in its order."""
    return tuple(Family(**entry) for entry in json.loads(FAMILIES.read_text()))


@cache
def proof() -> dict[str, Any]:
    """Results of the last run of the matrix, by the name of its row."""
    rows: dict[str, Any] = json.loads(PROOF.read_text())
    return rows


def makes(pipeline: str) -> str | None:
    """ "pictures", "videos" or "meshes": the proven output of a pipeline class; None: unknown."""
    tasks = [row["task"] for row in proof().values() if row["pipeline"] == pipeline]
    if not tasks:
        return None
    return {"video": "videos", "mesh": "meshes"}.get(tasks[0].rpartition("-")[2], "pictures")


def rows() -> list[dict[str, Any]]:
    """The grid, for `carpool models --json`."""
    return [_row(family) for family in families()]


def _row(family: Family) -> dict[str, Any]:
    proven = [proof()[case] for case in family.cases]
    modules = {name: None for row in proven for name in row["requests_per_forward"]}
    fused = [n for n in modules if any(row["requests_per_forward"].get(n, 1) > 1 for row in proven)]
    return {
        "family": family.family,
        "hub_ids": family.hub_ids,
        "tasks": sorted({row["task"] for row in proven}),
        "pipelines": sorted({row["pipeline"] for row in proven}),
        "fuses": fused,
        "alone": [name for name in modules if name not in fused],
        "mixed_sizes": family.mixed_sizes,
        "lora": bool(family.cases) and family.lora,
        "limits": family.limits,
        "largest_difference": max((row["largest_difference"] for row in proven), default=None),
    }


def table() -> Iterator[str]:
    """The grid as lines of text, for a terminal."""
    head = ("family", "tasks", "fuses", "sizes", "LoRA", "limits")
    body = [
        (
            row["family"],
            ", ".join(row["tasks"]) or "-",
            ", ".join(short(name) for name in row["fuses"]) or "-",
            "mixed" if row["mixed_sizes"] else "equal" if row["tasks"] else "-",
            "yes" if row["lora"] else "no",
            row["limits"],
        )
        for row in rows()
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    for line in (head, *body):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def short(name: str) -> str:
    """The short name of a method: `transformer` for `transformer.forward`."""
    return name.removesuffix(".forward")
