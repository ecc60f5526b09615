"""A pipeline's parameters, from the signature of its `__call__`: names, kinds, defaults."""

import inspect
import re
import types
import typing
from functools import lru_cache
from typing import Any

from carpool.engine.model.modular import Pipeline
from carpool.request.card import Parameter
from carpool.request.images import NAMES as PICTURE_NAMES
from carpool.request.values import ParameterKind

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(pipe: Pipeline) -> tuple[Parameter, ...]:
    """Read a pipeline's own signature; if it takes `**kwargs`, also those of its bases."""
    parameters: dict[str, Parameter] = {}
    for cls in type(pipe).__mro__:
        if "__call__" not in vars(cls):
            continue
        call = inspect.unwrap(vars(cls)["__call__"])
        named = list(inspect.signature(call).parameters.values())[1:]
        for parameter in named:
            if parameter.kind in _NAMED:
                parameters.setdefault(parameter.name, _read(parameter, call))
        if all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in named):
            break
    return tuple(parameters.values())


@lru_cache(256)
def source_of(cls: type, method: str) -> str:
    """The source of a class's method; empty if it has none."""
    try:
        return inspect.getsource(getattr(cls, method))
    except (AttributeError, OSError, TypeError):
        return ""


def _read(parameter: inspect.Parameter, call: Any) -> Parameter:
    annotation = _evaluated(parameter.annotation, getattr(call, "__globals__", {}))
    is_required = parameter.default is parameter.empty
    default = None if is_required else parameter.default
    return _parameter(parameter.name, annotation, default, is_required)


def parameter_of(declared: Any) -> Parameter:
    """Read one of a modular pipeline's inputs: diffusers' `InputParam`."""
    hint = _evaluated(declared.type_hint, {})
    is_required = declared.required and declared.default is None  # else diffusers sets its default
    return _parameter(declared.name, hint, declared.default, is_required)


def _parameter(name: str, annotation: Any, default: Any, required: bool) -> Parameter:
    plain = default if isinstance(default, (bool, int, float, str)) else None
    if annotation is not None:
        kinds = _kinds(annotation, name)
    elif plain is not None:
        kinds = _kinds(type(plain), name)
    elif "prompt" in name and "embeds" not in name:
        kinds = ("str",)
    else:
        kinds = ("other", "int", "float", "list", "dict")
    if name in PICTURE_NAMES:  # a path is no image: the pipeline would read the server's files
        kinds = tuple(dict.fromkeys([*(kind for kind in kinds if kind != "str"), "other"]))
    is_none = default is None and not required
    is_tuple = _takes_tuples(annotation, default)
    return Parameter(name, kinds[0], required, plain, kinds[1:], is_none, is_tuple)


def _takes_tuples(annotation: Any, default: Any) -> bool:
    """Whether a parameter takes a tuple but not a list."""
    if annotation is None:
        return isinstance(default, tuple)
    kinds = {typing.get_origin(option) or option for option in _options(annotation)}
    return tuple in kinds and list not in kinds


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Evaluate an annotation, which may be text (`from __future__ import annotations`).

    None without an annotation, or for text that cannot be evaluated, such as type-checking names.
    """
    if annotation is inspect.Parameter.empty:
        return None
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names)["it"]
    except Exception:
        return None if isinstance(annotation, str) else annotation


def _options(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; of a `Literal`, its values' types: the pipeline checks the value."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return tuple([option for argument in arguments for option in _options(argument)])
    return tuple(map(type, arguments)) if origin is typing.Literal else (annotation,)


def _kinds(annotation: Any, name: str) -> tuple[ParameterKind, ...]:
    """The kinds of value that a parameter takes, best description first."""
    options = [option for option in _options(annotation) if option is not types.NoneType]
    kinds: list[ParameterKind] = [
        typing.cast("ParameterKind", kind.__name__)
        for kind in (str, bool, float, int)
        if kind in options
    ]
    is_prompt = str in options and re.fullmatch(r"(negative_)?prompt(_\d)?", name) is not None
    lists = [o for o in options if (typing.get_origin(o) or o) in (list, tuple)]
    if any(typing.get_args(kind) in ((int,), (float,)) for kind in lists):
        kinds.append("numbers")
    if not kinds:
        kinds.append("other")
    batches = ((int,), (float,), *([(str,)] if is_prompt else []))  # one text for each prompt
    if any(_is_plain_list(option) and typing.get_args(option) not in batches for option in lists):
        kinds.append("list")
    if any((typing.get_origin(o) or o) is dict for o in options):
        kinds.append("dict")
    scalars = (str, bool, float, int, dict, *lists)
    if any(o not in scalars and typing.get_origin(o) not in scalars for o in options):
        kinds.append("other")  # tensors, callables, ...
    return tuple(dict.fromkeys(kinds))


def _is_plain_list(option: Any) -> bool:
    """Whether an annotation is a list, or a list of lists, of plain values."""
    if option in (str, bool, float, int, types.NoneType, ..., list, tuple):
        return True
    if typing.get_origin(option) in (list, tuple, typing.Union, types.UnionType):
        return all(_is_plain_list(argument) for argument in typing.get_args(option))
    return False
