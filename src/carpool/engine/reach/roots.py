"""Where foreign code enters a request: the pipeline's class, its parts, its modules, callbacks."""

import functools
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

from carpool.engine.foreign_code import all_blocks
from carpool.engine.reach.foreign import is_foreign
from carpool.engine.reach.frames import UNKNOWN, Arguments
from carpool.engine.reach.names import KEEPERS, PIPELINES, is_named, is_read_already
from carpool.engine.reach.referents import (
    ABSENT,
    UNSEEN,
    Referents,
    live,
    of_class,
    own_dict,
    parts_of,
)
from carpool.engine.reach.walk import Walk

_SETTING_UP = {  # never called by a call of the pipeline
    *("__init__", "__new__", "__init_subclass__", "__class_getitem__", "__set_name__", "__repr__"),
    *("__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__deepcopy__", "__copy__"),
    *("__eq__", "__hash__", "extra_repr", "reset_parameters", "init_weights", "_init_weights"),
    *("_apply", "apply", "train", "eval", "to", "half", "float", "cuda", "cpu", "load_state_dict"),
    *(
        "state_dict",
        "save_pretrained",
        "from_pretrained",
        "from_config",
        "save_config",
        "from_pipe",
    ),
    *(
        "register_modules",
        "load_config",
        "download",
        "from_single_file",
        "post_init",
        "tie_weights",
    ),
}
_TRICKS = ("__getattribute__", "__getattr__")
_CALLED = ("__call__", "new_forward", "pre_forward", "post_forward")  # of processors and hooks
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def walk_pipeline(walk: Walk) -> None:
    """Follow all that a call of the pipeline runs, whatever its arguments are."""
    pipe = walk.pipe
    me = live(pipe, is_own=True)
    _methods(walk, pipe, me)
    known: set[int] = set()
    _parts(walk, pipe, known)
    for block in all_blocks(own_dict(pipe).get("_blocks")):
        method = of_class(type(block), "__call__")
        if is_foreign(method):
            walk.invoke(live(method), Arguments((live(block, is_own=True), me)))


def walk_arguments(walk: Walk, arguments: Mapping[str, Any]) -> None:
    """Follow the callbacks of one request, and the objects of foreign classes that it brings."""
    me = live(walk.pipe, is_own=True)
    for name, value in arguments.items():
        first = me if "callback" in name or (is_named(type(walk.pipe), KEEPERS) and is_read_already(
            type(walk.pipe)
        )) else UNSEEN  # fmt: skip
        for one in (value, *(parts_of(value) if type(value) in (list, tuple, dict) else ())):
            _argument(walk, name, one, first)


def _argument(walk: Walk, name: str, value: Any, first: Referents) -> None:
    if isinstance(value, (nn.Module, type)):
        if isinstance(value, nn.Module):
            _module(walk, value)
        return
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, functools.partial)):
        rest = UNSEEN if first == UNSEEN else Arguments().spread
        _check(walk, name, value)
        walk.invoke(live(value), Arguments((first,), spread=rest))
        return
    cls = type(value)
    if is_read_already(cls):
        if of_class(cls, "callbacks") is not ABSENT or "callbacks" in own_dict(value):
            for one in own_dict(value).get("callbacks", ()):
                _argument(walk, name, one, first)
        return
    _check(walk, name, value)
    is_called = of_class(cls, "__call__") is not ABSENT
    me = live(value) if is_called else live(value, is_own=True)
    for method in _entries(cls, is_all=True).values():
        walk.invoke(live(method), Arguments((me, first)))


def _check(walk: Walk, name: str, value: Any) -> None:
    reason = walk.reason(value)
    if reason:
        walk.cause(f"the argument `{name}` holds {reason}")


def _parts(walk: Walk, pipe: Any, known: set[int]) -> None:
    """Follow the attributes of a pipeline; libraries call any method of its components."""
    config = own_dict(pipe).get("_internal_dict")
    for name, value in own_dict(pipe).items():
        _part(walk, value, known, is_called=isinstance(config, dict) and name in config)


def _part(walk: Walk, value: Any, known: set[int], *, is_called: bool = False) -> None:
    if id(value) in known or isinstance(value, type):
        return
    known.add(id(value))
    if isinstance(value, nn.Module):
        _module(walk, value)
    elif isinstance(value, (FunctionType, MethodType, functools.partial)):
        if is_foreign(value) or isinstance(value, MethodType):
            _check(walk, getattr(value, "__name__", "partial"), value)
            walk.invoke(live(value), UNKNOWN)
    elif isinstance(value, (list, tuple, dict)):
        for one in parts_of(value):
            _part(walk, one, known)
    elif is_named(type(value), PIPELINES):
        _methods(walk, value, live(value, is_own=True))
        _parts(walk, value, known)
    else:
        _methods(walk, value, live(value, is_own=True), is_called=is_called)


def _module(walk: Walk, module: nn.Module) -> None:
    for part in module.modules():
        mine = own_dict(part)
        me = live(part)
        forward = mine.get("forward")
        if forward is not None and (is_foreign(forward) or not isinstance(forward, FunctionType)):
            _check(walk, "forward", forward)
            walk.invoke(live(forward), UNKNOWN)
        _methods(walk, part, me, without={"forward"} if forward is not None else set())
        for name, value in mine.items():
            if name in _HOOKS:
                _hooks(walk, value, me)
            elif not isinstance(value, nn.Module):
                _added(walk, value)


def _hooks(walk: Walk, hooks: Any, me: Referents) -> None:
    for hook in tuple(hooks.values()) if isinstance(hooks, dict) else ():
        _check(walk, "hook", hook)
        if isinstance(hook, (FunctionType, MethodType, functools.partial)):
            walk.invoke(live(hook), Arguments((me,)))
        else:
            _methods(walk, hook, live(hook), first=me)


def _added(walk: Walk, value: Any) -> None:
    """Follow what was set on a module: processors, hooks of diffusers and accelerate, functions."""
    if isinstance(value, (FunctionType, MethodType)):
        if is_foreign(value):
            _check(walk, value.__name__, value)
            walk.invoke(live(value), UNKNOWN)
    elif isinstance(value, type) or type(value).__module__ == "builtins":
        return
    elif not is_read_already(type(value)):
        if any(of_class(type(value), name) is not ABSENT for name in _CALLED):
            _check(walk, type(value).__name__, value)
            _methods(walk, value, live(value))
    elif type(value).__name__ in ("HookRegistry", "SequentialHook"):
        for hook in parts_of(own_dict(value).get("hooks", ())):
            _check(walk, "hook", hook)
            _methods(walk, hook, live(hook))


def _methods(
    walk: Walk,
    obj: Any,
    me: Referents,
    *,
    first: Referents = frozenset(),
    is_called: bool = True,
    without: Iterable[str] = (),
) -> None:
    """Follow the foreign methods of an object that libraries call."""
    cls = type(obj)
    for trick in _TRICKS if cls not in walk.entries else ():
        method = of_class(cls, trick)
        if isinstance(method, FunctionType) and is_foreign(method):
            walk.cause(f"`{cls.__name__}.{trick}` decides at run time what is reached")
    if cls not in walk.entries:  # the same for its many objects, while nothing is exchanged
        is_all = not any(is_read_already(base) for base in cls.__mro__[:-1])
        is_all = is_all and is_called and not isinstance(obj, nn.Module)
        walk.entries[cls] = _entries(cls, is_all=is_all)
    for name, method in walk.entries[cls].items():
        if name not in without:
            walk.invoke(live(method), Arguments((me, first) if first else (me,)))


def _entries(cls: type, *, is_all: bool) -> dict[str, Any]:
    """The foreign methods of a class that its library's bases have as well, or all.

    A library's class that was patched has some, too.
    """
    if all(base.__module__ == "builtins" for base in cls.__mro__):
        return {}
    entries = {}
    for name in sorted({name for base in cls.__mro__ for name in vars(base)} - _SETTING_UP):
        places = [base for base in cls.__mro__ if name in vars(base)]
        value = vars(places[0])[name]
        if isinstance(value, property):
            value = value.fget
        is_overriding = len(places) > 1 and any(map(is_read_already, places))
        is_patched = is_read_already(places[0])
        is_entry = name in ("__call__", "forward") or is_overriding or is_patched or is_all
        if is_entry and is_foreign(value):
            entries[name] = value
    return entries
