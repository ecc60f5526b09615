"""Print the lines of code by package, and of each group of packages against its budget.

usage: make lines     (or: python .ci/lines.py)

A budget that is exceeded is said, and fails nothing: circles and imports upwards do, in
`tests/test_imports.py`.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = {  # lines of all files of these folders of src/carpool
    "engine schedule": 6_500,
    "server jobs media request": 6_000,
    "worker python cli": 3_000,
}


def lines(folder: Path, *, deep: bool = True) -> int:
    files = folder.rglob("*.py") if deep else folder.glob("*.py")
    return sum(len(file.read_text().splitlines()) for file in files)


def table(root: Path = ROOT) -> list[str]:
    """One line for each package, then one for each budget."""
    rows = []
    for house in (root / "src/carpool", root / "src/carpool_lab", root / "training"):
        rows.append(f"{house.relative_to(root)!s:32}{lines(house):7,}")
        rows.append(f"  {'(its own files)':30}{lines(house, deep=False):7,}")
        rows += [
            f"  {room.name:30}{lines(room):7,}"
            for room in sorted(house.iterdir())
            if room.is_dir() and lines(room)
        ]
    rows += [f"{name:32}{lines(root / name):7,}" for name in ("tests", "proof", "benchmarks")]
    for names, budget in BUDGETS.items():
        found = sum(lines(root / "src/carpool" / name) for name in names.split())
        verdict = "within" if found <= budget else f"{found - budget:,} OVER"
        rows.append(f"{' + '.join(names.split()):32}{found:7,}  of {budget:,}: {verdict}")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
