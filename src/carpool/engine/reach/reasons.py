"""Decide whether a request may share a ride, by the objects that its code reaches.

Requests interleave on one pipeline only if their code changes no object that outlives them. `walk`
follows code from where it enters a request, `source` reads functions, and `objects` classifies the
objects. In doubt a ride is private.
"""

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from operator import is_
from types import MappingProxyType
from typing import Any

from torch import nn

from carpool.engine.reach.objects import (
    ABSENT,
    CODE,
    CONTAINERS,
    DATA,
    HOOKS,
    Ref,
    entries,
    is_plain,
    own_dict,
)  # fmt: skip
from carpool.engine.reach.walk import Walk

log = logging.getLogger("carpool")
# reasons, cached with the parts of the pipeline, or the names that the callback looks up
_pipelines: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
_callbacks: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def private_reasons(pipe: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Why a request has to ride alone on the user's own pipeline: one sentence a cause.

    A pipeline is walked once, and again when its parts are replaced; a callback is walked once, and
    again when one of its names refers to another object, or one that may have changed.

    Args:
        pipe: the user's own pipeline, not a request's view.
    """
    try:
        parts, reasons = _of_pipeline(pipe)
        for name, value in arguments.items():
            if not is_plain(value):
                reasons = [*reasons, *_of_argument(pipe, parts, name, value)]
        return list(dict.fromkeys(reasons))
    except Exception as error:  # foreign objects may raise anything when inspected
        log.debug("the objects of a pipeline cannot be walked", exc_info=True)
        return [f"the code of the request cannot be walked: {type(error).__name__}"]


def _of_pipeline(pipe: Any) -> Any:
    parts = [type(pipe), *map(_part, own_dict(pipe).items())]
    with suppress(TypeError):  # no hash, or no weak references
        if (cached := _pipelines.get(pipe)) and cached[0] == parts:
            return cached
    walk = Walk(pipe)
    walk.enter(pipe, "own", "the pipeline")
    answer = parts, walk.read()
    with suppress(TypeError):
        _pipelines[pipe] = answer
    return answer


def _part(item: tuple[str, Any]) -> Any:
    """An attribute's identity, which changes with its forward and its hooks."""
    (name, value), cls = item, type(item[1])
    if not isinstance(value, nn.Module):
        return name, id(value), cls
    hooks = [len(vars(value).get(name, ())) for name in HOOKS]
    return name, id(value), cls, id(cls.forward), id(vars(value).get("forward")), hooks


def _of_argument(pipe: Any, parts: Any, name: str, value: Any) -> list[str]:
    owner, function = getattr(value, "__self__", value), getattr(value, "__func__", None)
    equality: Any = type(owner).__eq__
    is_key = equality is object.__eq__  # a tensor compares by its entries
    with suppress(TypeError):
        entry = _callbacks.get(owner) if is_key else None
        same_parts, same_function, names, reasons = entry or (None, None, [], [])
        if same_parts is parts and same_function is function and all(map(_is_same, names)):
            return list(reasons)
    walk = Walk(pipe, is_brought=True)
    first = [frozenset({Ref(pipe, "own")})] if "callback" in name else []
    walk.enter(value, "shared" if callable(value) else "own", name, *first)
    reasons, names = walk.read(), [(find, _contents(obj)) for find, obj in walk.names]
    with suppress(TypeError):
        objects = [obj for _, contents in names for obj in contents if not is_plain(obj)]
        if is_key and all(obj is ABSENT or isinstance(obj, (*CODE, *DATA)) for obj in objects):
            _callbacks[owner] = parts, function, names, reasons
    return reasons


def _is_same(name: tuple[Any, list[Any]]) -> bool:
    contents = _contents(name[0]())
    return len(contents) == len(name[1]) and all(map(is_, contents, name[1]))


def _contents(obj: Any) -> list[Any]:
    return list(entries(obj)) if type(obj) in CONTAINERS else [obj]
