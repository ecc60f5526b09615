"""Validate single values of settings and files by msgspec, without coercion.

A type's rule is the text after "must be" in errors: the description of its `msgspec.Meta`.
"""

import sys
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta as Meta

from carpool.errors import SettingRejected

Text = Annotated[str, Meta(min_length=1, description="text, not empty")]
Switch = Annotated[bool, Meta(description="true or false")]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
Positive = Annotated[int, Meta(ge=1)]
FINITE = sys.float_info.max


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value has this type and its bounds."""
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def meta_of(kind: Any) -> Meta:
    """The bounds and the rule in an annotation."""
    parts = (kind, *get_args(kind))  # of `Annotated[...] | None`, too
    return next((meta for part in parts for meta in getattr(part, "__metadata__", ())), Meta())


def rule_of(kind: Any) -> str:
    """The rule of a type, for errors."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return str(meta_of(kind).description)


def check_entry(where: str, key: str, value: Any, kind: Any) -> None:
    """Raise `SettingRejected` if a file's value is not of this type."""
    if not fits(value, kind):
        raise SettingRejected(f"{where}: {key} {value!r:.60}: must be {rule_of(kind)}", param=key)
