"""The objects that code reaches: their ownership, and why some exclude a shared ride."""

import collections
import contextvars
import enum
import functools
import logging
import random
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from carpool.engine.foreign_code import is_nameless
from carpool.engine.reach import names

Ownership = Literal["own", "given", "shared"]
UNKNOWN, ABSENT, _NOTHING = object(), object(), MappingProxyType[str, Any]({})
CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, functools.partial)
CONTAINERS, DATA = (dict, list, tuple, set, collections.deque), (torch.Tensor, np.ndarray)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice, frozenset),
    *(torch.dtype, torch.device, torch.Size, enum.Enum, re.Pattern, logging.Logger, PurePath),
    contextvars.ContextVar,
)
_STREAMS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_GLOBAL_STREAMS = (random._inst, np.random.mtrand._rand, torch.default_generator)
_KEEPERS = {"DiffusionPipeline", "ModularPipeline", "SchedulerMixin"}
_COPYING = {"__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__"}
_MAX_ENTRIES = 64  # distinguished entries of a container


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A live object that code reaches, or `UNKNOWN`.

    `own` objects are private to a request, `shared` ones are reachable by others, too; `given` is
    an argument of a forward, which may be a module. An own class stands for new instances of it.
    """

    obj: Any
    kind: Ownership = "shared"

    @property
    def cls(self) -> Any:  # a type, which mypy does not call hashable
        return self.obj if isinstance(self.obj, type) else type(self.obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.obj is other.obj and self.kind == other.kind

    def __hash__(self) -> int:
        return hash((id(self.obj), self.kind))


Value = frozenset[Ref]  # possible values of an expression; empty: created by the call, or immutable
EMPTY: Value = frozenset()
UNSEEN: Value = frozenset({Ref(UNKNOWN)})


def package(code: Any) -> str:
    """The package where a class or function was written, even if it is wrapped."""
    if is_nameless(code):
        return ""
    outer = getattr(code, "__globals__", None)  # `functools.wraps` copies `__module__`
    name = outer.get("__name__") if type(outer) is dict else getattr(code, "__module__", None)
    return str(name or "builtins").partition(".")[0]


def is_foreign(code: Any) -> bool:
    """Whether a class or function belongs to neither Python nor a known library."""
    return package(code) not in names.SHIPPED


@functools.cache  # a walk looks up each object; the next walk clears the cache
def foreign_functions(cls: Any) -> tuple[tuple[str, Any], ...]:
    """The foreign code attributes of a class and its bases, without descriptor access."""
    return tuple(
        (name, member)
        for base in cls.__mro__
        for name, member in list(vars(base).items())
        if isinstance(function := function_of(member), FunctionType) and is_foreign(function)
    )


def function_of(member: Any) -> Any:
    """The function behind a class's attribute, or behind a library's decorator."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    while not is_foreign(member if isinstance(member, FunctionType) else type(member)):
        inner = getattr(member, "func", None) or getattr(member, "__wrapped__", None)
        if inner is None or isinstance(member, type):
            break
        member = inner
    return member


def is_plain(obj: Any, depth: int = 3) -> bool:
    """Whether an object is immutable."""
    if type(obj) is tuple and depth:
        return len(obj) <= _MAX_ENTRIES and all(is_plain(entry, depth - 1) for entry in obj)
    return isinstance(obj, _PLAIN) and (isinstance(obj, enum.Enum) or not is_foreign(type(obj)))


def own_dict(obj: Any) -> Mapping[str, Any]:
    """The attributes of an object itself."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except Exception:  # it has no `__dict__`, or an unusual class
        return _NOTHING
    if isinstance(obj, nn.Module):
        parts = (attributes.get(name) or {} for name in ("_parameters", "_buffers", "_modules"))
        return collections.ChainMap(attributes, *parts)
    return attributes if isinstance(attributes, dict) and not isinstance(obj, type) else _NOTHING


def of_class(cls: type, name: str) -> Any:
    """A class's attribute, without descriptor access."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), ABSENT)


def entries(container: Any, key: Any = ABSENT) -> Iterable[Any]:
    """The entries of a container, or the entry of a key; `UNKNOWN` for large containers."""
    if isinstance(container, nn.Module):
        return container._modules.values()
    if type(container) is dict and isinstance(key, (str, int)):
        return [container[key]] if key in container else []
    values = dict.values(container) if isinstance(container, dict) else container
    entries = list(islice(values, _MAX_ENTRIES + 1))
    return entries if len(entries) <= _MAX_ENTRIES else [UNKNOWN]


def cause(obj: Any, pipe: Any, *, is_own: bool) -> str:
    """Why an object that code has excludes its request from a shared ride; "" if it does not."""
    cls: Any = type(obj)
    if isinstance(obj, ModuleType):
        return "a module that blocks" if obj.__name__.partition(".")[0] in names.BLOCKING else ""
    if isinstance(obj, CODE):
        name = getattr(obj, "__name__", "")
        is_cause = package(obj) in names.BLOCKING or names.ANYWHERE.match(name)
        return name if is_cause or names.FORBIDDEN.match(f"{package(obj)}.{name}") else ""
    if any(package(base) in names.BLOCKING for base in cls.__mro__):
        return f"a {cls.__name__}, which blocks or belongs to threads"
    is_console = obj is sys.stdout or obj is sys.stderr
    if hasattr(cls, "__next__") and not is_console and not (is_own and is_foreign(cls)):
        return f"a {cls.__name__}, an iterator or a file"
    if is_own:
        is_copied = _COPYING.isdisjoint(name for name, _ in foreign_functions(cls))
        return "" if is_copied else f"a {cls.__name__}, which has a way of its own to be copied"
    if obj is pipe:
        return "the pipeline itself"
    bases = [base.__name__ for base in cls.__mro__ if not is_foreign(base)]
    if not _KEEPERS.isdisjoint(bases) or cls.__module__ == "contextlib":
        return f"a {cls.__name__}, which keeps the state of calls"
    if isinstance(obj, _STREAMS) and not any(obj is stream for stream in _GLOBAL_STREAMS):
        return f"a {cls.__name__}, a stream of random numbers"
    return ""
