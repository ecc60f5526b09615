"""Objects that no two requests may reach: the pipeline itself, locks, files, random streams."""

import io
import random
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from carpool.engine.reach.names import BLOCKING, KEEPERS, is_named, is_read_already, package
from carpool.engine.reach.referents import own_dict, parts_of

_DEEPEST, _MOST = 5, 3000
_STREAMS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_GLOBAL_STREAMS = (random._inst, np.random.mtrand._rand, torch.default_generator)

_CONSOLE = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


class HeldObjects:
    """Tells why an object keeps a request from a shared ride, if it does."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._copied = {  # for each request: code that has the original sees none of it
            id(value)
            for value in own_dict(pipe).values()
            if isinstance(value, (list, dict, set))
            or (not isinstance(value, (nn.Module, type, FunctionType)) and self._is_state(value))
        }
        self._reasons: dict[tuple[int, bool], tuple[Any, str]] = {}

    def reason(self, obj: Any, *, is_own: bool) -> str:
        """What an object is or holds; "" where it is nothing of the kind.

        Args:
            is_own: the request has a copy of it.
        """
        if obj is sys.modules:  # asked whether a module is there
            return ""
        key = id(obj), is_own
        if key not in self._reasons:
            self._reasons[key] = obj, self._look(obj, is_own)
        return self._reasons[key][1]

    def _look(self, obj: Any, is_own: bool) -> str:
        known: set[int] = set()
        waiting = [(obj, 0)]
        while waiting and len(known) < _MOST:
            one, depth = waiting.pop()
            if id(one) in known:
                continue
            known.add(id(one))
            reason = self._itself(one, is_own)
            if reason:
                return reason if depth == 0 else f"{reason}, inside of an object,"
            if depth < _DEEPEST and _is_looked_into(one):
                waiting.extend((part, depth + 1) for part in parts_of(one))
        return ""

    def _itself(self, obj: Any, is_own: bool) -> str:
        cls = type(obj)
        if isinstance(obj, ModuleType):
            name = obj.__name__.partition(".")[0]
            return f"the module `{obj.__name__}`" if name in BLOCKING else ""
        if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
            return f"`{obj.__module__}.{obj.__name__}`" if package(obj) in BLOCKING else ""
        if any(base.__module__.partition(".")[0] in BLOCKING for base in cls.__mro__):
            return f"a {cls.__name__}, which blocks or belongs to threads,"
        if isinstance(obj, io.IOBase) and not any(obj is one for one in _CONSOLE):
            return "an open file"
        if is_own:
            return ""
        if obj is self._pipe:
            return "the pipeline itself"
        if id(obj) in self._copied:
            return f"the pipeline's own {cls.__name__}, of which each request has a copy,"
        if is_named(cls, KEEPERS):
            return f"a {cls.__name__}, which keeps the state of calls,"
        if isinstance(obj, _STREAMS) and not any(obj is one for one in _GLOBAL_STREAMS):
            return f"a {cls.__name__}, a stream of random numbers,"
        return ""

    def _is_state(self, value: Any) -> bool:
        cls = type(value)
        return is_named(cls, KEEPERS) or not is_read_already(cls)


def _is_looked_into(obj: Any) -> bool:
    if isinstance(obj, (nn.Module, type, ModuleType, FunctionType, str, bytes)):
        return False
    if isinstance(obj, (torch.Tensor, np.ndarray)):
        return False
    return isinstance(obj, (dict, list, tuple, set, frozenset, MethodType)) or not is_read_already(
        type(obj)
    )
