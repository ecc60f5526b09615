"""Validate single values of settings and files by msgspec, without coercion.

A type's rule is the text after "must be" in errors: the description of its `msgspec.Meta`.
"""

from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1, description="text, not empty")]
Switch = Annotated[bool, Meta(description="true or false")]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value has this type and its bounds."""
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        return False
    return True


@cache
def rule_of(kind: Any) -> str:
    """The rule of a type, for errors."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return next(str(meta.description) for meta in get_args(kind) if isinstance(meta, Meta))
