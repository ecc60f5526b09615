"""The rules of settings: declaration, parsing from text, checks by msgspec without coercion.

Parsers and checks raise `SettingRejected`; its message has the value, the rule and an alternative.
A type's rule is the text after "must be" in errors: the description of its `msgspec.Meta`.
"""

import dataclasses
import math
import re
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


def setting(default: Any, help_: str, unit: str = "", *, listed: bool = False) -> Any:
    """Declare a field of a settings class.

    Args:
        listed: several values, separated by commas; the flag is repeatable.
    """
    metadata = {"help": help_, "unit": unit, "listed": listed}
    return dataclasses.field(default=default, metadata=metadata)


DEFAULT = ""  # key of a value without a component
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SIZES = {"": 1, "B": 1} | {
    f"{letter}{mark}": base**power
    for power, letter in enumerate("KMGT", 1)
    for mark, base in (("IB", 1024), ("B", 1000), ("", 1024))
}


def parse_bytes(name: str, text: str) -> int:
    """Parse bytes such as `20GiB`, `800 MB` or `1.5G` (GiB)."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _SIZES.get(match[2].upper(), 0) if match else 0.0
    if not size >= 1:
        raise SettingRejected(f"{name}={text!r}: must be a size such as 20GiB or 800MB", param=name)
    return int(size)


def streamed_names(stream: str) -> tuple[str, ...] | None:
    """The components in the setting `stream`; None for `auto`, empty for `none`."""
    names = tuple(name.strip() for name in stream.split(",") if name.strip())
    if names == ("auto",):
        return None
    if names == ("none",):
        return ()
    if not names or {"auto", "none"} & set(names):
        rule = "must be auto, none, or names of components separated by commas"
        raise SettingRejected(f"stream={stream!r}: {rule}", param="stream")
    return names


def by_component(setting: str, text: str | None, *, needs_name: bool = False) -> dict[str, str]:
    """Parse a list of `[COMPONENT=]VALUE`; the value of all other components is under `DEFAULT`."""
    values: dict[str, str] = {}
    for entry in text.split(",") if text is not None else ():
        name, equals, value = (part.strip() for part in entry.rpartition("="))
        if not value or (equals and not name) or (needs_name and not name):
            form = "COMPONENT=VALUE" if needs_name else "[COMPONENT=]VALUE"
            raise SettingRejected(f"{setting}={text!r}: write {form}, separated by commas")
        if name in values:
            rule = f"{name or 'all components'} can have one value only"
            raise SettingRejected(f"{setting}={text!r}: {rule}")
        values[name] = value
    return values


def base_type(hint: Any) -> type:
    """The plain type of an annotation: `int` for `int | None`, `str` for a Literal or a tuple."""
    if get_origin(hint) in (Literal, tuple):
        return str
    plain: list[Any] = [arg for arg in get_args(hint) if arg is not type(None)] or [hint]
    return plain[0] if isinstance(plain[0], type) else base_type(plain[0])


def parse(variable: str, text: str, hint: Any) -> Any:
    """Parse the value of a setting from an environment variable."""
    kind = base_type(hint)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        return tuple(text.split(",")) if get_origin(hint) is tuple else kind(text)
    except (ValueError, KeyError):
        raise SettingRejected(f"{variable}={text!r}: must be {_KINDS[kind]}") from None


def check(name: str, value: Any, hint: Any) -> None:
    """Raise `SettingRejected` if a value is not of a setting's type, or out of its bounds."""
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or not fits(value, tuple[Text, ...]):
            raise SettingRejected(f"{name}: must be a tuple of strings, none of them empty")
    elif not fits(value, hint):
        bounds, kind = meta_of(hint), base_type(hint)
        if get_origin(hint) is Literal:
            expected = rule_of(hint)
        elif not fits(value, kind):
            expected = _KINDS[kind]
        elif bounds.le == FINITE and not math.isfinite(value):
            expected = "a finite number"
        elif bounds.ge is not None and not value >= bounds.ge:
            expected = f"at least {bounds.ge}"
        else:
            expected = f"at most {bounds.le}"
        raise SettingRejected(f"{name}={value!r}: must be {expected}")
