"""Foreign functions: those that have to be read, inside of a library's decorators as well."""

import functools
from types import FunctionType, MethodType
from typing import Any

from carpool.engine.reach.names import is_read_already
from carpool.engine.reach.referents import own_dict


def is_foreign(code: Any) -> bool:
    """Whether a function is code that has to be read, or has such code inside."""
    return any(
        isinstance(one, FunctionType) and not is_read_already(one) for one in (code, *around(code))
    )


def around(function: Any) -> list[Any]:
    """The functions that a function of a library goes around, as decorators make them."""
    inside: list[Any] = []
    parts: list[Any]
    waiting = [function]
    while waiting and len(inside) < 20:
        one = waiting.pop()
        if isinstance(one, (staticmethod, classmethod, MethodType)):
            parts = [one.__func__]
        elif isinstance(one, functools.partial):
            parts = [one.func]
        elif isinstance(one, FunctionType) and not is_read_already(one):
            parts = []
        else:
            parts = [own_dict(one).get("__wrapped__")] if not isinstance(one, type) else []
            for cell in (one.__closure__ or ()) if isinstance(one, FunctionType) else ():
                try:
                    parts.append(cell.cell_contents)
                except ValueError:  # empty
                    continue
        for part in parts:
            is_function = isinstance(part, (FunctionType, MethodType, functools.partial))
            if is_function and not any(part is other for other in inside):
                inside.append(part)
                waiting.append(part)
    return inside
