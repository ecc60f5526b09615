"""One run of a code object: its variables, what it is given, and the names of values for people."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any, Protocol

from carpool.engine.reach.referents import FRESH, UNSEEN, Referent, Referents, box, live, own_dict
from carpool.engine.reach.summary import Atom, CodeSummary, Made


@dataclass(eq=False, slots=True)
class Frame:
    """One run of a code object."""

    summary: CodeSummary
    globals: Mapping[str, Any]
    free: Callable[[str], Referents]
    cells_are_shared: bool  # those of outer functions outlive the call
    parameters: dict[str, Referents]
    results: dict[int, Referents] = field(default_factory=dict)
    is_early: bool = False  # something was asked for before its call had been followed
    asked: set[str] = field(default_factory=set)  # cells that are being looked up

    @property
    def name(self) -> str:
        return self.summary.code.co_qualname.replace("<locals>.", "")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call gives."""

    args: tuple[Referents, ...] = ()
    kwargs: Mapping[str, Referents] = field(default_factory=dict)
    spread: Referents = frozenset()  # what `*args` and `**kwargs` may hold
    is_known: bool = True  # False: a library calls, and gives what it makes

    def all(self) -> Referents:
        return self.spread.union(*self.args, *self.kwargs.values())

    def first(self) -> Referents:
        return self.args[0] if self.args else self.spread

    def after(self, first: Referents) -> "Arguments":
        return Arguments((first, *self.args), self.kwargs, self.spread, self.is_known)


UNKNOWN = Arguments(is_known=False)


class Interpreter(Protocol):
    """What judges of values and calls need of the walk."""

    def cause(self, text: str) -> None:
        """Note a reason against a shared ride."""

    def function(self, function: Any, given: Arguments) -> Referents:
        """Run a Python function that is there already."""

    def made(self, made: Made, number: int, frame: Frame, given: Arguments) -> Referents:
        """Run a function that the call has made."""

    def invoke(self, callees: Referents, given: Arguments) -> Referents:
        """What calls outside of any code give."""

    def written(self, referent: Referent, name: str) -> Referents:
        """What the call has written on an attribute of something of its own."""

    def set(self, referent: Referent, name: str, value: Referents) -> None:
        """Write on an attribute of something of the call's own."""


def bound(
    code: CodeType, given: Arguments, defaults: Mapping[str, Referents]
) -> dict[str, Referents]:
    positional, keyword, rest, rest_named = parameter_names(code)
    bound: dict[str, Referents] = {}
    for i, name in enumerate((*positional, *keyword)):
        if i < min(len(given.args), len(positional)):
            bound[name] = given.args[i]
        elif name in given.kwargs:
            bound[name] = given.kwargs[name]
        else:
            bound[name] = given.spread.union(defaults.get(name, FRESH))
    if rest:
        bound[rest] = _handed_on([("", one) for one in given.args[len(positional) :]], given)
    if rest_named:
        more = [(name, one) for name, one in given.kwargs.items() if name not in bound]
        bound[rest_named] = _handed_on(more, given)
    return bound


def _handed_on(entries: list[tuple[str, Referents]], given: Arguments) -> Referents:
    """What `*args` or `**kwargs` hold: with their order and names, where these are known."""
    inside = box(given.spread.union(*(one for _, one in entries)))
    parts = frozenset(part for one in inside for part in one.parts)
    if given.spread or not given.is_known:
        return inside
    return frozenset((Referent("box", tuple(entries), parts),))


def parameter_names(code: CodeType) -> tuple[list[str], list[str], str, str]:
    names_, count = list(code.co_varnames), code.co_argcount
    end = count + code.co_kwonlyargcount
    rest = names_[end] if code.co_flags & 0x04 else ""
    named = names_[end + bool(rest)] if code.co_flags & 0x08 else ""
    return names_[:count], names_[count:end], rest, named


def global_(globals_: Mapping[str, Any], name: str) -> Referents:
    if name in globals_:
        return live(globals_[name])
    builtins = globals_.get("__builtins__", {})
    builtins = own_dict(builtins) if isinstance(builtins, ModuleType) else builtins
    return live(builtins[name]) if name in builtins else UNSEEN


def imported(name: str, has_names: bool) -> Referents:
    module = sys.modules.get(name if has_names else name.partition(".")[0])
    return FRESH if module is None else live(module)


def text_of(value: Iterable[Atom]) -> str:
    paths = sorted(_path(atom) for atom in value if atom[0] != "fresh")
    return min(paths, default="a value", key=len)


def _path(atom: Atom) -> str:
    if atom[0] == "attr":
        return f"{_path(atom[1])}.{atom[2]}"
    if atom[0] == "item":
        return f"{_path(atom[1])}[...]"
    if atom[0] in ("global", "free", "cell", "param", "import"):
        return str(atom[1])
    return {"superof": "super()", "call": "...()", "made": "a function"}.get(atom[0], "...")


NO_FRAME = Frame(CodeSummary((lambda: None).__code__), {}, lambda name: FRESH, False, {})
