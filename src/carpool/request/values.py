"""Types of parameter values: checks, JSON, and conversion to plain Python.

Callers of the Python API may pass numbers of numpy and torch, which become Python numbers. They are
recognised by their methods, so this module imports neither library.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from carpool.request.images import size_of
from carpool.types import MAX_SEED

ParameterKind = Literal["int", "float", "bool", "str", "numbers", "list", "dict", "other"]
MAX_FLOAT32 = 3.4e38


def as_plain(value: Any, *, also_arrays: bool) -> Any:
    """Convert numpy and torch scalars to Python numbers, with `also_arrays` arrays to lists.

    Lists and tuples are converted by entry.
    """
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(as_plain(item, also_arrays=also_arrays) for item in value)
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "tolist"):
        return value
    return value.tolist() if also_arrays or len(shape) == 0 else value


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_SEED


def is_number(value: Any) -> bool:
    """Return whether a value is a number in the range of float32, as pipelines need."""
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_plain and -MAX_FLOAT32 <= value <= MAX_FLOAT32


def is_text(value: Any) -> bool:
    """Return whether a value is a string of valid Unicode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(is_number(entry) for entry in value)


def are_pictures(value: Any) -> bool:
    """Return whether a value is decoded pictures, also in lists: not possible in JSON."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(are_pictures(item) for item in value)
    return size_of(value) is not None


def is_json(value: Any) -> bool:
    """Return whether a value is JSON: plain values in lists and dicts, with finite numbers."""
    if isinstance(value, (list, tuple)):
        return all(map(is_json, value))
    if isinstance(value, Mapping):
        return all(is_text(name) and is_json(item) for name, item in value.items())
    return value is None or isinstance(value, bool) or is_number(value) or is_text(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and is_json(value)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (is_int, "a whole number, at most 2**63 - 1"),
    "float": (is_number, "a finite number of at most 3.4e38"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (is_text, "one string of valid Unicode"),
    "numbers": (are_numbers, "a list of finite numbers"),
    "list": (_is_list, "a list of plain values"),
    "dict": (lambda value: isinstance(value, Mapping) and is_json(value), "an object"),
    "other": (are_pictures, ""),
}
"""Checks by kind, for values from JSON or uploads, with their rules in words."""
