"""Decide whether a request may share a ride: by what the pipeline and its callbacks reach."""

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from torch import nn

from carpool.engine.reach.referents import of_class, own_dict
from carpool.engine.reach.roots import walk_arguments, walk_pipeline
from carpool.engine.reach.walk import Walk

log = logging.getLogger("carpool")
_NONE: Mapping[str, Any] = MappingProxyType({})
_pipelines: "weakref.WeakKeyDictionary[Any, tuple[Any, list[str]]]" = weakref.WeakKeyDictionary()


def private_reasons(pipe: Any, arguments: Mapping[str, Any] = _NONE) -> list[str]:
    """Why a request has to ride alone on the user's own pipeline; empty if it may share.

    What the pipeline itself reaches is walked once, and again when its parts are exchanged; the
    callbacks of a request are walked each time, since what they reach may have changed.

    Args:
        pipe: the user's own pipeline, not a request's view of it.
        arguments: those of the request.

    Returns:
        One sentence a cause. It never raises: what cannot be walked is a cause.
    """
    try:
        reasons = [*_of_pipeline(pipe)]
        brought = {name: one for name, one in arguments.items() if not isinstance(one, _DATA)}
        if brought:
            walk = Walk(pipe)
            walk_arguments(walk, brought)
            reasons += [one for one in walk.causes if one not in reasons]
        return reasons
    except Exception as error:  # objects of others may do anything when they are looked at
        log.debug("what a pipeline reaches cannot be walked", exc_info=True)
        return [f"the code of the request cannot be walked: {type(error).__name__}"]


_DATA = (bool, int, float, str, bytes, type(None))


def _of_pipeline(pipe: Any) -> list[str]:
    parts = _parts(pipe)
    try:
        known = _pipelines.get(pipe)
    except TypeError:  # it has no hash, or no weak references
        known = None
    if known is not None and known[0] == parts:
        return known[1]
    walk = Walk(pipe)
    walk_pipeline(walk)
    reasons = [*walk.causes]
    with suppress(TypeError):
        _pipelines[pipe] = parts, reasons
    return reasons


def _parts(pipe: Any) -> Any:
    """What tells a pipeline from itself with other parts, in a few microseconds."""
    parts: list[Any] = [id(type(pipe))]
    for name, value in own_dict(pipe).items():
        parts.append((name, id(value), id(type(value))))
        if isinstance(value, nn.Module):
            mine = own_dict(value)
            forwards = id(mine.get("forward")), id(of_class(type(value), "forward"))
            parts.append((forwards, len(mine.get("_forward_hooks", ()))))
    return parts
