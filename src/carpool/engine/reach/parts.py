"""What an attribute or an item of a referent is, as Python would find it."""

import functools
from collections import defaultdict
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from carpool.engine.reach import names
from carpool.engine.reach.foreign import is_foreign
from carpool.engine.reach.frames import Arguments, Interpreter
from carpool.engine.reach.referents import (
    ABSENT,
    FRESH,
    UNSEEN,
    Referent,
    Referents,
    box,
    is_numbers,
    live,
    of_class,
    of_instance,
    own_dict,
    parts_of,
)


def attribute(walk: Interpreter, referent: Referent, name: str) -> Referents:
    kind, mine = referent.kind, frozenset((referent,))
    if kind in ("fresh", "text", "made", "bound", "method"):
        return FRESH
    if kind == "unseen":
        return UNSEEN
    if kind == "box":
        return mine
    if kind == "super":
        [me] = referent.parts
        cls = me.obj if me.kind == "instance" else type(me.obj)
        return _of_class(walk, me, of_class(cls, name, referent.key), name)
    written = walk.written(referent, name)
    if kind == "instance":
        if name == "__class__":
            return live(referent.obj)
        value = of_class(referent.obj, name)
        return written | (FRESH if value is ABSENT else _of_class(walk, referent, value, name))
    return written | _of_object(walk, referent, name)


def _of_object(walk: Interpreter, referent: Referent, name: str) -> Referents:
    obj, is_own = referent.obj, referent.kind == "own"
    mine = frozenset((referent,))
    if name == "__class__":
        return live(type(obj))
    if name == "__dict__":
        return mine
    if isinstance(obj, ModuleType):
        value = own_dict(obj).get(name, ABSENT)
        return FRESH if value is ABSENT else live(value)
    if isinstance(obj, type):
        value = of_class(obj, name)
        if isinstance(value, (staticmethod, classmethod)):
            return _of_class(walk, referent, value, name)
        return UNSEEN if value is ABSENT else live(value)
    of_type = of_class(type(obj), name)
    if not isinstance(of_type, property):
        value = of_instance(obj, name)
        if value is not ABSENT:
            return live(value, is_own=is_own)
    if of_type is not ABSENT:
        return _of_class(walk, referent, of_type, name)
    getter = of_class(type(obj), "__getattr__")
    if isinstance(getter, FunctionType) and is_foreign(getter):
        return walk.function(getter, Arguments((mine, frozenset((Referent("text", name),)))))
    if is_numbers(obj):
        return mine
    is_known = is_own or names.is_read_already(type(obj))
    return FRESH if is_known and not isinstance(obj, nn.Module) else UNSEEN


def _of_class(walk: Interpreter, referent: Referent, value: Any, name: str) -> Referents:
    """What an attribute of a class gives when its object is asked for it."""
    mine = frozenset((referent,))
    if value is ABSENT:
        return FRESH
    if isinstance(value, staticmethod):
        return live(value.__func__)
    if isinstance(value, classmethod):
        is_class = referent.kind == "instance" or isinstance(referent.obj, type)
        cls = live(referent.obj if is_class else type(referent.obj))
        return frozenset((Referent("bound", id(value), cls, value.__func__),))
    if isinstance(value, (property, functools.cached_property)):
        getter = value.fget if isinstance(value, property) else value.func
        if is_foreign(getter):
            if isinstance(value, functools.cached_property) and referent.kind == "shared":
                walk.cause(f"`{type(referent.obj).__name__}.{name}` is a cached property")
            return walk.invoke(live(getter), Arguments((mine,)))
        if name == "components":
            return box(frozenset().union(*(live(one) for one in parts_of(referent.obj))))
        if referent.kind == "shared" and is_numbers(referent.obj):
            return mine if name in names.ALIASES else FRESH
        return UNSEEN if referent.kind == "shared" else FRESH
    if is_foreign(value):
        return frozenset((Referent("bound", id(value), mine, value),))
    if isinstance(value, FunctionType) or hasattr(type(value), "__get__"):
        if referent.kind == "shared" and is_numbers(referent.obj) and not callable(value):
            return mine if name in names.ALIASES else FRESH
        return frozenset((Referent("method", name, mine, value),))
    return live(value)


def item(walk: Interpreter, where: str, referent: Referent) -> Referents:
    kind, obj = referent.kind, referent.obj
    if kind == "box":
        return referent.parts | FRESH
    if kind == "unseen":
        return UNSEEN
    if kind not in ("shared", "own"):
        return FRESH
    if is_numbers(obj):
        return frozenset((referent,))
    getter = of_class(type(obj), "__getitem__")
    if is_foreign(getter):
        return walk.invoke(live(getter), Arguments((frozenset((referent,)), FRESH)))
    if kind == "shared" and isinstance(obj, type):
        return FRESH
    if kind == "shared" and of_class(type(obj), "__next__") is not ABSENT:
        walk.cause(f"`{where}` takes from an iterator that outlives the call")
    if kind == "shared" and isinstance(obj, defaultdict) and obj.default_factory is not None:
        walk.cause(f"`{where}` reads a `defaultdict` that outlives the call")
    if all(of_class(type(obj), name) is ABSENT for name in ("__getitem__", "__iter__")):
        return FRESH
    is_own = kind == "own"
    return FRESH.union(*(live(one, is_own=is_own) for one in parts_of(obj)))
