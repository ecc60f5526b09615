"""What a call does and gives: foreign code is run, the libraries' is judged by name."""

import functools
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
from torch import nn

from carpool.engine.reach import names
from carpool.engine.reach.foreign import around, is_foreign
from carpool.engine.reach.frames import UNKNOWN, Arguments, Frame, Interpreter
from carpool.engine.reach.parts import attribute, item
from carpool.engine.reach.referents import (
    ABSENT,
    CHANGED_BY_OPERATORS,
    FRESH,
    OUTSIDE,
    UNSEEN,
    Referent,
    Referents,
    box,
    is_numbers,
    live,
    of_class,
    of_instance,
    own_dict,
)

_METHODS = (MethodDescriptorType, WrapperDescriptorType)  # as a class has them


class Calls:
    """Judges calls for a walk."""

    def __init__(self, walk: Interpreter) -> None:
        self._walk = walk

    def answer(
        self, frame: Frame, callee: Referent, name: str, given: Arguments, text: str
    ) -> Referents:
        kind = callee.kind
        if kind == "made":
            made, number, outer = callee.obj
            return self._walk.made(made, number, outer, given)
        if kind == "bound":
            [function] = live(callee.obj)
            return self.answer(frame, function, name, given.after(callee.parts), text)
        if kind == "method":
            return self._method(frame, callee, given, text)
        if kind == "instance":
            method = of_class(callee.obj, "__call__")
            return self._walk.invoke(live(method), given.after(frozenset((callee,)))) if is_foreign(
                method
            ) else FRESH  # fmt: skip
        if kind in ("shared", "own"):
            return self._object(frame, callee, given, text)
        if name in names.ANYWHERE:
            self._walk.cause(f"`{frame.name}` calls `{text}`")
        if kind == "unseen" and (
            name in names.MUTATORS or _ends_in_place(name) or _changes_module(name)
        ):
            self._walk.cause(f"`{frame.name}` calls `{text}`, which changes what outlives the call")
        self._hand_over(given)
        return UNSEEN if kind == "unseen" else callee.parts | FRESH

    def _object(self, frame: Frame, callee: Referent, given: Arguments, text: str) -> Referents:
        obj = callee.obj
        if isinstance(obj, MethodType):
            function, owner = live(obj.__func__), live(obj.__self__)
            if not is_foreign(obj.__func__):
                name = getattr(obj.__func__, "__name__", "")
                function = frozenset((Referent("method", name, owner or FRESH, obj.__func__),))
            else:
                given = given.after(owner)
            return frozenset().union(*(self.answer(frame, f, "", given, text) for f in function))
        if isinstance(obj, functools.partial):
            kwargs = {name: live(value) for name, value in obj.keywords.items()}
            args = (*map(live, obj.args), *given.args)
            more = Arguments(args, {**kwargs, **given.kwargs}, given.spread, given.is_known)
            return self._walk.invoke(live(obj.func), more)
        if isinstance(obj, FunctionType) and not names.is_read_already(obj):
            return self._walk.function(obj, given)
        if isinstance(obj, type):
            return self._instance(frame, obj, given, text)
        if isinstance(
            obj, (FunctionType, BuiltinFunctionType, *_METHODS)
        ) or "__wrapped__" in own_dict(obj):
            return self._library(frame, obj, given, text)
        method = of_class(type(obj), "__call__")
        mine = frozenset((callee,))
        forward = of_instance(obj, "forward")
        if isinstance(obj, nn.Module) and forward is ABSENT:
            forward = of_class(type(obj), "forward")
            mine_first = given.after(mine)
        else:
            mine_first = given
        if isinstance(obj, nn.Module) and is_foreign(forward):
            return self._walk.invoke(live(forward), mine_first)
        if is_foreign(method):
            return self._walk.invoke(live(method), given.after(mine))
        self._hand_over(given)
        if not names.is_read_already(type(obj)) and not isinstance(method, FunctionType):
            self._walk.cause(f"`{frame.name}` calls `{text}`, compiled code that cannot be read")
        return FRESH

    def _instance(self, frame: Frame, cls: type, given: Arguments, text: str) -> Referents:
        if names.is_read_already(cls):
            return self._library(frame, cls, given, text)
        if names.is_named(cls, names.MODES):
            self._walk.cause(f"`{frame.name}` makes a mode of torch, `{cls.__name__}`")
        mine = frozenset((Referent("instance", id(cls), obj=cls),))
        for name in ("__new__", "__init__"):
            method = of_class(cls, name)
            method = method.__func__ if isinstance(method, staticmethod) else method
            first = live(cls) if name == "__new__" else mine
            if is_foreign(method):
                self._walk.invoke(live(method), given.after(first))
        self._hand_over(given)
        inside = box(given.all())  # what the object may hold
        return mine | (inside if issubclass(cls, (list, dict, tuple)) else frozenset())

    def _library(self, frame: Frame, function: Any, given: Arguments, text: str) -> Referents:
        name = getattr(function, "__name__", "")
        wrapped = [one for one in around(function) if is_foreign(one)]
        if wrapped:
            return frozenset[Referent]().union(
                *(self._walk.invoke(live(one), given) for one in wrapped)
            )
        if not names.is_read_already(function):
            self._walk.cause(f"`{frame.name}` calls `{text}`, compiled code that cannot be read")
        first = given.first()
        outside = [one for one in first if one.kind in OUTSIDE]
        is_method = isinstance(function, _METHODS) or (
            isinstance(function, FunctionType) and "." in function.__qualname__
        )
        if is_method and outside and (name in names.MUTATORS or _ends_in_place(name)):
            self._walk.cause(f"`{frame.name}` changes what outlives the call with `{text}`")
        owner = getattr(function, "__self__", None)
        if name in names.ANYWHERE or (
            name in names.DYNAMIC and names.package(function) == "builtins"
        ):
            self._walk.cause(f"`{frame.name}` calls `{text}`")
        if isinstance(owner, CHANGED_BY_OPERATORS) and name in names.MUTATORS:
            self._walk.cause(f"`{frame.name}` calls `{text}`, which changes what outlives the call")
        inside = [part for one in first if one.kind == "box" for part in one.parts]
        changes = name in names.ON_THE_FIRST and outside
        changes = changes or (name[-1:] == "_" != name[-2:-1] and [*outside, *inside])
        if changes:
            self._walk.cause(f"`{frame.name}` changes what outlives the call with `{text}`")
        if any(one.kind in OUTSIDE for one in given.kwargs.get("out", ())):
            self._walk.cause(
                f"`{frame.name}` writes the answer of `{text}` to what outlives the call"
            )
        if name == "open" and not _is_for_reading(given):
            self._walk.cause(f"`{frame.name}` opens a file for writing")
        if function is setattr:
            for referent in first:
                for key in given.args[1] if len(given.args) > 1 else ():
                    self._walk.set(referent, key.key if key.kind == "text" else "", given.spread)
        self._hand_over(given)
        return self._library_answer(frame, function, name, given)

    def _library_answer(
        self, frame: Frame, function: Any, name: str, given: Arguments
    ) -> Referents:
        first = given.first()
        if function is type and len(given.args) == 1:
            known = [live(one.obj if one.kind == "instance" else type(one.obj))
                     for one in first if one.obj is not None]  # fmt: skip
            return FRESH.union(*known)
        if function is vars:
            return first or FRESH
        if function is getattr and len(given.args) > 1:
            keys = [one.key for one in given.args[1] if one.kind == "text"]
            if keys and len(keys) == len(given.args[1]):
                found = [attribute(self._walk, referent, key) for referent in first for key in keys]
                return FRESH.union(*found, *given.args[2:])
            below = [item(self._walk, frame.name, referent) for referent in first]
            return FRESH.union(*below) | (
                UNSEEN if any(p.kind == "shared" for p in first) else FRESH
            )
        if name in names.SHALLOW:
            inside = [
                item(self._walk, frame.name, referent) for one in given.args for referent in one
            ]
            if name in ("max", "min", "next"):
                return FRESH.union(*inside)
            return box(frozenset[Referent]().union(*inside, *given.kwargs.values())) | FRESH
        if name in names.ALIASES or name in names.ALIASING_FUNCTIONS:
            return FRESH.union(one for one in first if one.kind == "unseen" or is_numbers(one.obj))
        return FRESH

    def _method(self, frame: Frame, callee: Referent, given: Arguments, text: str) -> Referents:
        """A call of a method that a library's class has."""
        name = callee.key
        [me] = callee.parts
        wrapped = [one for one in around(callee.obj) if is_foreign(one)]
        if wrapped:
            given = given.after(callee.parts)
            return frozenset[Referent]().union(
                *(self._walk.invoke(live(one), given) for one in wrapped)
            )
        self._hand_over(given)
        is_changing = name.startswith(names.OF_PIPELINES_START)
        if isinstance(me.obj, nn.Module):
            is_changing = _changes_module(name)
        if name in names.ANYWHERE or is_changing:
            self._walk.cause(f"`{frame.name}` calls `{text}`")
        if me.kind == "shared" and _changes(me.obj, name):
            self._walk.cause(f"`{frame.name}` calls `{text}`, which changes what outlives the call")
        if name == "shuffle" and any(one.kind in OUTSIDE for one in given.first()):
            self._walk.cause(f"`{frame.name}` changes what outlives the call with `{text}`")
        if is_numbers(me.obj):
            return frozenset((me,)) if name in names.ALIASES or name[-1:] == "_" else FRESH
        if name in names.PARTS and me.kind == "shared" and isinstance(me.obj, nn.Module):
            return UNSEEN
        if name in names.PARTS and me.kind in ("shared", "own"):
            return box(item(self._walk, frame.name, me)) | item(self._walk, frame.name, me)
        return FRESH

    def _hand_over(self, given: Arguments) -> None:
        """A library may call the functions that it is given."""
        everything = given.all()
        for referent in everything.union(*(one.parts for one in everything if one.kind == "box")):
            is_code = referent.kind == "made"
            is_code = is_code or (referent.kind == "bound" and is_foreign(referent.obj))
            if is_code or (referent.kind == "shared" and _is_handed_code(referent.obj)):
                self._walk.invoke(frozenset((referent,)), UNKNOWN)


def _is_handed_code(obj: Any) -> bool:
    if isinstance(obj, (nn.Module, type)):
        return False
    if isinstance(obj, (FunctionType, functools.partial, MethodType)):
        return is_foreign(obj)
    return is_foreign(of_class(type(obj), "__call__"))


def _changes(obj: Any, name: str) -> bool:
    if is_numbers(obj):
        return _ends_in_place(name) or (isinstance(obj, np.ndarray) and name in names.MUTATORS)
    return name in names.MUTATORS


def _changes_module(name: str) -> bool:
    return name in names.OF_MODULES or name.startswith(names.OF_MODULES_START)


def _ends_in_place(name: str) -> bool:
    """Whether a function is torch's way of writing on a tensor."""
    is_operator = name.startswith("__i") and name.endswith("__") and name[2:-2] in names.IN_PLACE
    return is_operator or (name.endswith("_") and not name.startswith("_"))


def _is_for_reading(given: Arguments) -> bool:
    mode = given.args[1] if len(given.args) > 1 else given.kwargs.get("mode", given.spread)
    return all(one.kind == "text" and not set(one.key) & set("wax+") for one in mode)
