"""Tables of other packages: entry points of the group `carpool.specs`.

Each names a dict {(class name, method): Spec}, as in this package's modules, and is trusted like
them: prove it with `carpool check`. Carpool's own table of a class takes precedence. An entry
point that cannot be loaded, or is no such dict, is a warning; the others are still used.
"""

import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from carpool.engine.specs import SPECS
from carpool.engine.specs.rules import Spec

GROUP = "carpool.specs"
log = logging.getLogger("carpool")


def spec_of(class_name: str, method: str) -> Spec | None:
    """The table of a class's method: Carpool's own, else that of an installed package."""
    name = class_name, method
    return SPECS.get(name) or added_specs().get(name)


@cache
def added_specs() -> Mapping[tuple[str, str], Spec]:
    """The tables of all entry points; for duplicates, the first entry point by name."""
    specs: dict[tuple[str, str], Spec] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        for name, spec in _loaded(entry).items():
            if name in SPECS or name in specs:
                log.warning("%s has a table for %s.%s, which is known already", entry.value, *name)
            else:
                specs[name] = spec
    return specs


def _loaded(entry: EntryPoint) -> Mapping[tuple[str, str], Spec]:
    try:
        tables: Any = entry.load()
    except (Exception, SystemExit) as error:  # a foreign module may raise anything
        reason = f"{type(error).__name__}: {error}"
    else:
        if isinstance(tables, Mapping) and all(_is_table(*item) for item in tables.items()):
            return tables
        reason = "it is not a dict {(class name, method): Spec}"
    log.warning(
        "tables of %s (entry point %r of %s) are not used: %s",
        entry.value, entry.name, GROUP, reason,
    )  # fmt: skip
    return {}


def _is_table(name: Any, spec: Any) -> bool:
    is_name = isinstance(name, tuple) and len(name) == 2 and all(isinstance(p, str) for p in name)
    return is_name and isinstance(spec, Spec)
