"""Follow what foreign code does with the objects that it can reach, call by call.

The walk runs summaries of code over referents instead of values. It goes into every foreign
function that it meets, with what that one would be given; libraries' functions are judged by name.
"""

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from carpool.engine.reach.bytecode import UnreadableCode, read
from carpool.engine.reach.calls import Calls
from carpool.engine.reach.foreign import is_foreign
from carpool.engine.reach.frames import (
    NO_FRAME,
    Arguments,
    Frame,
    bound,
    global_,
    imported,
    parameter_names,
    text_of,
)
from carpool.engine.reach.held import HeldObjects
from carpool.engine.reach.parts import attribute, item
from carpool.engine.reach.referents import (
    CHANGED_BY_OPERATORS,
    FRESH,
    OUTSIDE,
    UNSEEN,
    Referent,
    Referents,
    box,
    live,
    of_class,
)
from carpool.engine.reach.summary import Action, Atom, Value

_DEEPEST, _MOST_FRAMES, _MOST_CAUSES = 40, 4000, 20


class Walk:
    """One walk from a pipeline's roots; `causes` are the reasons against a shared ride."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.causes: dict[str, None] = {}
        self.entries: dict[type, dict[str, Any]] = {}  # methods that libraries call, by class
        self._held = HeldObjects(pipe)
        self._answers: dict[Any, Referents] = {}  # of runs, by code and what they were given
        self._fields: dict[
            tuple[Any, str], Referents
        ] = {}  # written by the call on what is its own
        self._kept: list[Frame] = []  # their ids are in keys
        self._depth = 0
        self._calls = Calls(self)

    def cause(self, text: str) -> None:
        if len(self.causes) < _MOST_CAUSES:  # one is enough, and they are for people
            self.causes.setdefault(text)

    def reason(self, obj: Any) -> str:
        """Why nobody else may reach an object, or ""."""
        return self._held.reason(obj, is_own=False)

    # functions

    def function(self, function: Any, given: Arguments) -> Referents:
        """Run a Python function that is there already."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        key = (function.__code__, id(function.__globals__), *map(id, cells.values()))

        def free(name: str) -> Referents:
            try:
                return live(cells[name].cell_contents)
            except (KeyError, ValueError):  # nothing is in it yet
                return UNSEEN

        defaults = dict(function.__kwdefaults__ or {})
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        values = function.__defaults__ or ()
        defaults.update(zip(names[len(names) - len(values) :], values, strict=True))
        referents = {name: live(value) for name, value in defaults.items()}
        return self._run(function.__code__, key, function.__globals__, free, True, given, referents)

    def made(self, made: Any, number: int, frame: Frame, given: Arguments) -> Referents:
        """Run a function that the call has made."""

        def free(name: str) -> Referents:
            if name in frame.summary.cells:
                return self._cell(frame, name)
            return frame.free(name)

        anything = self.value(frame, made.defaults)
        names = parameter_names(made.code)[0] if anything - FRESH else []
        return self._run(
            made.code, (made.code, id(frame), number), frame.globals, free,
            frame.cells_are_shared, given, dict.fromkeys(names, anything), outer=frame,
        )  # fmt: skip

    def _run(
        self,
        code: CodeType,
        key: Any,
        globals_: Mapping[str, Any],
        free: Callable[[str], Referents],
        cells_are_shared: bool,
        given: Arguments,
        defaults: Mapping[str, Referents],
        outer: Frame | None = None,
    ) -> Referents:
        parameters = bound(code, given, defaults)
        key = (key, tuple(parameters.items()))
        if key in self._answers:
            return self._answers[key]
        self._answers[key] = FRESH
        if self._depth >= _DEEPEST or len(self._kept) >= _MOST_FRAMES:
            self.cause(f"`{code.co_qualname}` calls more code than can be followed")
            return FRESH
        try:
            summary = read(code)
        except UnreadableCode as error:
            self.cause(f"bytecode cannot be read: {error}")
            return FRESH
        shared = cells_are_shared
        if outer is not None:
            mine = set(outer.summary.cells)
            shared = shared and not mine.issuperset(code.co_freevars)
        frame = Frame(summary, globals_, free, shared, parameters)
        self._kept.append(frame)
        for name, referents in parameters.items():
            for referent in referents:
                self._check(frame, frozenset((("param", name),)), referent)
        self._depth += 1
        try:
            for _ in range(3):  # what loops bring back to their beginning
                frame.is_early, before = False, len(self._fields)
                for action in summary.actions:
                    self._follow(frame, action, outer)
                if not frame.is_early and len(self._fields) == before:
                    break
            self._answers[key] = answer = self.value(frame, summary.returns) or FRESH
        finally:
            self._depth -= 1
        return answer

    def _follow(self, frame: Frame, action: Action, outer: Frame | None) -> None:
        referents = self.value(frame, action.target)
        if action.kind == "load":
            for referent in referents:
                self._check(frame, action.target, referent)
        elif action.kind == "rebind":
            if action.target and next(iter(action.target))[0] == "global":
                self.cause(f"`{frame.name}` writes the global `{action.name}`")
            elif not _is_made_by(outer, action.name):
                self.cause(f"`{frame.name}` writes `{action.name}` of the function around it")
        elif action.kind == "write":
            self._write(frame, action, referents)
        elif action.kind == "augment":
            for referent in referents:
                if referent.kind == "shared" and isinstance(referent.obj, CHANGED_BY_OPERATORS):
                    self.cause(f"`{frame.name}` changes `{text_of(action.target)}` in place")
        else:
            self._call(frame, action, referents)

    def _check(self, frame: Frame, value: Value, referent: Referent) -> None:
        if referent.kind not in ("shared", "own"):
            return
        reason = self._held.reason(referent.obj, is_own=referent.kind == "own")
        if reason:
            self.cause(f"`{frame.name}` reaches {reason} as `{text_of(value)}`")

    def _write(self, frame: Frame, action: Action, referents: Referents) -> None:
        text = (
            f"{text_of(action.target)}.{action.name}"
            if action.name
            else f"{text_of(action.target)}[...]"
        )
        value = self.value(frame, action.value)
        for referent in referents:
            if referent.kind in OUTSIDE:
                kind = _kind(referent.obj)
                self.cause(f"`{frame.name}` writes `{text}`{kind}")
            elif referent.kind in ("own", "instance", "box", "fresh"):
                self.set(referent, action.name, value)

    def set(self, referent: Referent, name: str, value: Referents) -> None:
        cls = referent.obj if referent.kind == "instance" else type(referent.obj)
        if referent.kind in ("own", "instance") and name:
            setter = of_class(cls, "__setattr__")
            descriptor = of_class(cls, name)
            own = frozenset((referent,))
            if isinstance(setter, FunctionType) and is_foreign(setter):
                self.function(setter, Arguments((own, frozenset((Referent("text", name),)), value)))
            if isinstance(descriptor, property) and is_foreign(descriptor.fset):
                self.invoke(live(descriptor.fset), Arguments((own, value)))
            outside = frozenset(one for one in value if one.kind not in ("fresh", "text"))
            if outside - self._fields.get((referent, name), frozenset()):
                self._fields[referent, name] = (
                    self._fields.get((referent, name), frozenset()) | outside
                )
                self._answers.clear()

    def written(self, referent: Referent, name: str) -> Referents:
        return self._fields.get((referent, name), frozenset())

    # values

    def value(self, frame: Frame, value: Value) -> Referents:
        referents: set[Referent] = set()
        for atom in value:
            referents |= self._atom(frame, atom)
        return frozenset(referents)

    def _atom(self, frame: Frame, atom: Atom) -> Referents:
        kind = atom[0]
        if kind == "attr":
            below = (attribute(self, referent, atom[2]) for referent in self._atom(frame, atom[1]))
            return frozenset[Referent]().union(*below) or FRESH
        if kind == "item":
            below = (item(self, frame.name, referent) for referent in self._atom(frame, atom[1]))
            return frozenset[Referent]().union(*below) or FRESH
        if kind == "param":
            return frame.parameters.get(atom[1], FRESH)
        if kind == "global":
            return global_(frame.globals, atom[1])
        if kind == "free":
            return frame.free(atom[1])
        if kind == "cell":
            return self._cell(frame, atom[1])
        if kind == "call":
            if atom[1] not in frame.results:
                frame.is_early = True
            return frame.results.get(atom[1], FRESH)
        if kind == "made":
            made = frame.summary.made[atom[1]]
            return frozenset((Referent("made", (id(frame), atom[1]), obj=(made, atom[1], frame)),))
        if kind == "box":
            return box(self.value(frame, atom[1]))
        if kind == "const" and isinstance(atom[1], str):
            return frozenset((Referent("text", atom[1]),))
        if kind == "import":
            return imported(atom[1], atom[2])
        if kind == "superof":
            mine = self._atom(frame, atom[1])
            cls = next((one.obj for one in frame.free("__class__") if one.kind == "shared"), None)
            return frozenset(Referent("super", cls, frozenset((one,))) for one in mine)
        return FRESH

    def _cell(self, frame: Frame, name: str) -> Referents:
        if name in frame.asked:
            return FRESH
        frame.asked.add(name)
        try:
            return self.value(frame, frame.summary.cells[name]) or FRESH
        finally:
            frame.asked.discard(name)

    def _call(self, frame: Frame, action: Action, callees: Referents) -> None:
        args = [self.value(frame, one) for one in action.args]
        kwargs = {name: self.value(frame, one) for name, one in action.kwargs}
        spread: Referents = frozenset()
        for value in action.spread:
            referents_of = self.value(frame, value)
            handed_on = next(iter(referents_of)) if len(referents_of) == 1 else None
            if handed_on is not None and handed_on.kind == "box" and handed_on.key is not None:
                for name, one in handed_on.key:  # as they came
                    if name:
                        kwargs[name] = one
                    else:
                        args.append(one)
            else:
                spread = spread.union(*(item(self, frame.name, one) for one in referents_of))
        given = Arguments(tuple(args), kwargs, spread)
        called = next((atom[2] for atom in action.target if atom[0] == "attr"), "")
        referents: set[Referent] = set()
        for callee in callees:
            referents |= self._calls.answer(frame, callee, called, given, text_of(action.target))
        frame.results[action.result] = frozenset(referents) or FRESH

    def invoke(self, callees: Referents, given: Arguments) -> Referents:
        """What calls outside of any summary give."""
        referents: set[Referent] = set()
        for callee in callees:
            referents |= self._calls.answer(NO_FRAME, callee, "", given, "")
        return frozenset(referents)


def _is_made_by(outer: Frame | None, name: str) -> bool:
    return outer is not None and (name in outer.summary.cells or not outer.cells_are_shared)


def _kind(obj: Any) -> str:
    if isinstance(obj, nn.Module):
        return f" on the module {type(obj).__name__}"
    if isinstance(obj, type):
        return f" on the class {obj.__name__}"
    return ", which outlives the call"
