"""What one code object does, in terms of its parameters, globals and closure: `CodeSummary`.

Values are sets of atoms. An atom is a path from something that the code is given, such as
`("attr", ("global", "box"), "pipe")`; what the code makes for itself is `FRESH`. A summary is
found once for each code object and means something else in each function that has that code.
"""

from dataclasses import dataclass, field
from types import CodeType
from typing import Any

Atom = tuple[Any, ...]
Value = frozenset[Atom]

FRESH_ATOM: Atom = ("fresh",)
FRESH: Value = frozenset((FRESH_ATOM,))
NOTHING: Value = frozenset()
DEEPEST = 8  # steps of a path; what lies deeper is taken for what it lies in


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that code does with values."""

    kind: str  # "load", "write", "augment", "call", "rebind" (a global, or a cell)
    target: Value  # what is loaded, written on, or called
    name: str = ""  # of the attribute, global or cell; "" of an item
    value: Value = NOTHING  # what is written
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()
    spread: tuple[Value, ...] = ()  # `*args` and `**kwargs` of a call
    result: int = -1  # of a call: its answer is the atom `("call", result)`


@dataclass(frozen=True, slots=True)
class Made:
    """A function that code makes."""

    code: CodeType
    defaults: Value


@dataclass(slots=True)
class CodeSummary:
    """All that one code object does, in the order of its instructions."""

    code: CodeType
    actions: list[Action] = field(default_factory=list)
    returns: Value = NOTHING
    cells: dict[str, Value] = field(default_factory=dict)  # variables that inner functions share
    made: dict[int, Made] = field(default_factory=dict)  # by the number in their atoms


def attribute(value: Value, name: str) -> Value:
    return frozenset(_below(atom, "attr", name) for atom in value) or FRESH


def item(value: Value) -> Value:
    parts: set[Atom] = set()
    for atom in value:
        if atom[0] == "box":
            parts |= atom[1] or FRESH
        else:
            parts.add(_below(atom, "item"))
    return frozenset(parts) or FRESH


def box(*values: Value) -> Value:
    """A container made by the code, with what is in it."""
    inside = frozenset(
        atom for value in values for atom in value if atom[0] not in ("fresh", "const")
    )
    if not inside:
        return FRESH
    if max(map(_depth, inside)) >= DEEPEST:
        return inside
    return frozenset((("box", inside),))


def _below(atom: Atom, *step: Any) -> Atom:
    if atom[0] in ("fresh", "const"):
        return FRESH_ATOM
    return atom if _depth(atom) >= DEEPEST else (step[0], atom, *step[1:])


def _depth(atom: Atom) -> int:
    if atom[0] in ("attr", "item", "superof"):
        return 1 + _depth(atom[1])
    if atom[0] == "box":
        return 1 + max(map(_depth, atom[1]), default=0)
    return 1
