"""The weight and the words of the house, by room: lines, constants, names that are no nouns.

Each row has its goal, and today's ceiling where that is above the goal. Ceilings only fall: a
ceiling that is far above what is there fails, too.
"""

import ast
import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.rooms import LINES, ROOMS, ROOT, files_of

CONSTANTS: dict[str, tuple[int, int]] = {"schedule": (20, 20), "fleet": (15, 15)}  # numbers
NAMES: dict[str, tuple[float, float]] = {  # per cent of all bound names
    "engine": (0.5, 0.5),
    "schedule": (0.5, 0.5),
    "fleet": (0.5, 0.5),
    "worker": (0.5, 0.5),
    "server": (0.5, 0.5),
    "compat": (0.5, 0.5),
    "jobs, media": (0.5, 0.5),
    "python, cli, settings": (0.5, 0.5),
    "others": (0.5, 0.5),
    "lab": (0.5, 0.5),
    "benchmarks, proof": (0.5, 0.5),
}
FREE = 0.06  # of a ceiling above its goal: what may be free below it

_PRONOUNS = """one ones other others another each both all any some several many none nobody
everybody everyone everything something nothing anything anyone someone who what which whose
whoever whatever whichever mine theirs ours yours hers own same this that these those them they it
neither either such"""
_PARTICIPLES = """found known given said told asked made done taken kept left held sent got came
gone went began begun seen shown drawn drew built chosen used wanted needed meant thought heard
felt become became grown thrown written spoken woken broken eaten fallen risen driven ridden hidden
paid laid led met lost sold stood understood spent lent bent sought brought bought caught taught
won"""
_COMPARATIVES = """better best worse worst more most less least fewer fewest faster fastest slower
slowest wider widest nearer nearest larger largest smaller smallest longer longest shorter shortest
earlier earliest later latest newer newest older oldest higher highest lower lowest further furthest
farther bigger biggest sooner soonest closer closest younger youngest"""
NO_NOUNS = frozenset(f"{_PRONOUNS} {_PARTICIPLES} {_COMPARATIVES}".split())
EXCEPTIONS = frozenset({"__all__"})


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines and names of variables, parameters and attributes, at each place that binds one."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name


def is_no_noun(name: str) -> bool:
    return name not in EXCEPTIONS and name.strip("_").lower() in NO_NOUNS


def constants(tree: ast.Module) -> list[str]:
    """The names at the top of a module whose values are numbers, or tuples of them."""
    names = []
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
            try:
                numbers = ast.literal_eval(value)
            except ValueError:
                continue
            numbers = numbers if isinstance(numbers, tuple) else (numbers,)
            if all(isinstance(number, int | float) for number in numbers):
                names.append(target.id)
    return names


def held(amount: float, row: tuple[float, float]) -> str | None:
    """What is wrong with an amount of a row of a table, if anything is."""
    goal, ceiling = row
    if amount > ceiling:
        return f"{amount:,} is above the ceiling of {ceiling:,}; the goal is {goal:,}"
    if ceiling > goal and amount < max(goal, (1 - FREE) * ceiling):
        return f"{amount:,} is far below the ceiling of {ceiling:,}: lower that"
    return None


def lines(room: str) -> int:
    return sum(len(file.read_text().splitlines()) for file in files_of(room))


def constants_of(room: str) -> list[str]:
    return [name for file in files_of(room) for name in constants(parsed(file))]


def share_of_no_nouns(room: str) -> float:
    names = [name for file in files_of(room) for _, name in bound_names(parsed(file))]
    return round(100 * sum(map(is_no_noun, names)) / len(names), 1)


@pytest.mark.parametrize("room", LINES)
def test_a_room_has_no_more_lines_than_its_budget(room: str) -> None:
    assert held(lines(room), LINES[room]) is None


@pytest.mark.parametrize("room", CONSTANTS)
def test_a_room_has_no_more_constants_than_its_budget(room: str) -> None:
    assert held(len(constants_of(room)), CONSTANTS[room]) is None


def test_each_constant_of_the_scheduler_has_been_played_at_half_and_at_twice_its_value() -> None:
    with (ROOT / "docs/scheduling-constants.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["constant"] for row in rows] == constants_of("schedule"), "run `make constants`"
    assert all(row["meaning"] for row in rows)


@pytest.mark.parametrize("room", NAMES)
def test_bound_names_are_nouns(room: str) -> None:
    wrong = held(share_of_no_nouns(room), NAMES[room])
    found = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in files_of(room)
        for line, name in bound_names(parsed(file))
        if is_no_noun(name)
    ]
    assert wrong is None, "\n".join([wrong or "", *found])


def test_every_file_has_a_room_and_every_room_files() -> None:
    assert all(files_of(room) for room in ROOMS)
    assert ROOMS.keys() == LINES.keys()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("for one in many: pass", ["one"]), ("known: int = 3", ["known"]),
        ("def f(given, *, told=1): return given", ["given", "told"]),
        ("[found for found, x in y]", ["found"]), ("self._said, b = 1, 2", ["_said"]),
        ("if (best := f()): pass", ["best"]), ("try: f()\nexcept E as other: pass", ["other"]),
        ("match x:\n case [a, most]: pass", ["most"]), ("print(one); x.found", []),
        ("most_rows = 3; __all__ = []", []),
    ],
)  # fmt: skip
def test_pronouns_participles_and_comparatives_are_found_wherever_they_are_bound(
    source: str, names: list[str]
) -> None:
    assert [name for _, name in bound_names(ast.parse(source)) if is_no_noun(name)] == names


if __name__ == "__main__":
    for name in ROOMS:
        goal, ceiling = LINES[name]
        row = f"{name:24}{lines(name):8,} lines of {ceiling:7,}, goal {goal:7,}"
        if name in NAMES:
            row += f"{share_of_no_nouns(name):7} % of names are no nouns"
        print(row)
