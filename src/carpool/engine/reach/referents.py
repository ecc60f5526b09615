"""What a value may be when code runs: an object that is there already, or one that the call makes.

`Referent` is the walk's word for it. Objects are looked at without running any code of theirs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import (
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

MOST_PARTS = 2000  # of one container that are looked at
ABSENT: Any = object()
_PLAIN = (bool, int, float, complex, bytes, type(None), torch.dtype, torch.device, range, slice)


@dataclass(frozen=True, slots=True)
class Referent:
    """One thing that a value may be.

    Kinds: "fresh", made by the call; "text", a string; "shared", an object that outlives the call;
    "own", an object of which the request has a copy; "unseen", part of a shared object that is not
    there yet; "made", a function made by the call; "instance", an object of a class, made by the
    call; "bound", a function with its first argument; "method", a library's method of an object;
    "box", a container made by the call; "super", of an object.
    """

    kind: str
    key: Any = None
    parts: frozenset["Referent"] = frozenset()
    obj: Any = field(default=None, compare=False)


Referents = frozenset[Referent]
OUTSIDE = ("shared", "unseen")  # what outlives the call
CHANGED_BY_OPERATORS = (list, dict, set, bytearray, np.ndarray, torch.Tensor)
FRESH_REFERENT = Referent("fresh")
FRESH: Referents = frozenset((FRESH_REFERENT,))
UNSEEN: Referents = frozenset((Referent("unseen"),))


def live(obj: Any, *, is_own: bool = False) -> Referents:
    """The referent of an object that is there before the call."""
    if isinstance(obj, str):
        return frozenset((Referent("text", obj),))
    if isinstance(obj, _PLAIN):
        return FRESH
    is_own = is_own and not isinstance(obj, (nn.Module, type, FunctionType, ModuleType))
    return frozenset((Referent("own" if is_own else "shared", id(obj), obj=obj),))


def box(referents: Referents) -> Referents:
    inside = frozenset(one for one in referents if one.kind not in ("fresh", "text"))
    if any(one.kind == "box" for one in inside):  # one level is enough to know what is in it
        inside = inside.union(*(one.parts for one in inside if one.kind == "box"))
        inside = frozenset(one for one in inside if one.kind != "box")
    return frozenset((Referent("box", parts=inside),)) if inside else FRESH


def own_dict(obj: Any) -> dict[str, Any]:
    """The attributes of an object itself, without asking it."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if isinstance(attributes, dict) else {}


def of_class(cls: type, name: str, after: type | None = None) -> Any:
    """What a class or its bases have under a name, or `ABSENT`."""
    bases = type.__dict__["__mro__"].__get__(cls)
    if after in bases:
        bases = bases[bases.index(after) + 1 :]
    for base in bases:
        value = type.__dict__["__dict__"].__get__(base).get(name, ABSENT)
        if value is not ABSENT:
            return value
    return ABSENT


def of_instance(obj: Any, name: str) -> Any:
    """What an object itself has under a name, or `ABSENT`; slots are of the object."""
    mine = own_dict(obj)
    if name in mine:
        return mine[name]
    if isinstance(obj, nn.Module):
        for kind in ("_parameters", "_buffers", "_modules"):
            entries = mine.get(kind)
            if isinstance(entries, dict) and name in entries:
                return entries[name]
    slot = of_class(type(obj), name)
    if isinstance(slot, (MemberDescriptorType, GetSetDescriptorType)):
        try:
            return slot.__get__(obj, type(obj))
        except Exception:  # empty, or of another kind of object
            return ABSENT
    return ABSENT


def parts_of(obj: Any) -> Iterator[Any]:
    """What a container or a plain object holds."""
    if isinstance(obj, dict):
        yield from (value for _, value in zip(range(MOST_PARTS), dict.values(obj), strict=False))
        yield from own_dict(obj).values()
        return
    for kind in (list, tuple, set, frozenset):
        if isinstance(obj, kind):
            entries = kind.__iter__(obj)  # type: ignore[arg-type]  # one kind after the other
            yield from (value for _, value in zip(range(MOST_PARTS), entries, strict=False))
            return
    if isinstance(obj, nn.Module):
        modules = own_dict(obj).get("_modules")
        if isinstance(modules, Mapping):
            yield from modules.values()
        return
    if type(obj).__module__ == "collections" and hasattr(type(obj), "__iter__"):
        yield from (value for _, value in zip(range(MOST_PARTS), [*obj], strict=False))
        return
    if isinstance(obj, MethodType):
        yield from (obj.__self__, obj.__func__)
        return
    yield from own_dict(obj).values()
    for cls in type(obj).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            value = of_instance(obj, name) if name != "__dict__" else ABSENT
            if value is not ABSENT:
                yield value


def is_numbers(obj: Any) -> bool:
    return isinstance(obj, (torch.Tensor, np.ndarray))
