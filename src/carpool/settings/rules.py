"""The rules of settings: declaration, parsing from text, checks."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from carpool.errors import SettingRejected
from carpool.settings.validation import Text, fits, rule_of


def setting(
    default: Any,
    help_: str,
    unit: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    finite: bool = False,
    listed: bool = False,  # several values, separated by commas; the flag is repeatable
) -> Any:
    """Declare a field of a settings class."""
    rule = {"help": help_, "unit": unit, "least": least, "most": most, "finite": finite}
    rule["listed"] = listed
    return dataclasses.field(default=default, metadata=rule)


DEFAULT = ""  # key of a value without a component
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SIZES = {"": 1, "B": 1} | {
    f"{letter}{mark}": base**power
    for power, letter in enumerate("KMGT", 1)
    for mark, base in (("IB", 1024), ("B", 1000), ("", 1024))
}


def parse_bytes(name: str, text: str) -> int:
    """Parse bytes such as `20GiB`, `800 MB` or `1.5G` (GiB).

    Raises:
        SettingRejected: another text, or less than a byte.
    """
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _SIZES.get(match[2].upper(), 0) if match else 0.0
    if not size >= 1:
        raise SettingRejected(f"{name}={text!r}: must be a size such as 20GiB or 800MB", param=name)
    return int(size)


def streamed_names(stream: str) -> tuple[str, ...] | None:
    """The components in the setting `stream`; None for `auto`, empty for `none`.

    Raises:
        SettingRejected: no names, or a reserved word in a list.
    """
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
    """Parse a list of `[COMPONENT=]VALUE`; the value of all other components is under `DEFAULT`.

    Raises:
        SettingRejected: an entry is empty or repeated, or lacks a required component.
    """
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
    plain: list[type] = [arg for arg in get_args(hint) if arg is not type(None)] or [hint]
    return plain[0]


def parse(variable: str, text: str, hint: Any) -> Any:
    """Parse the value of a setting from an environment variable.

    Raises:
        SettingRejected: the text does not have the setting's type.
    """
    kind = base_type(hint)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        return tuple(text.split(",")) if get_origin(hint) is tuple else kind(text)
    except (ValueError, KeyError):
        raise SettingRejected(f"{variable}={text!r}: must be {_KINDS[kind]}") from None


def check(name: str, value: Any, hint: Any, rule: Mapping[str, Any]) -> None:
    """Raise `SettingRejected` if a value is not of a setting's type, or breaks its rule."""
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or not fits(value, tuple[Text, ...]):
            raise SettingRejected(f"{name}: must be a tuple of strings, none of them empty")
    elif not fits(value, hint):
        expected = rule_of(hint) if get_origin(hint) is Literal else _KINDS[base_type(hint)]
        raise SettingRejected(f"{name}={value!r}: must be {expected}")
    elif value is not None and rule["finite"] and not math.isfinite(value):
        raise SettingRejected(f"{name}={value!r}: must be a finite number")
    elif value is not None and rule["least"] is not None and not value >= rule["least"]:
        raise SettingRejected(f"{name}={value!r}: must be at least {rule['least']}")
    elif value is not None and rule["most"] is not None and not value <= rule["most"]:
        raise SettingRejected(f"{name}={value!r}: must be at most {rule['most']}")
