"""Replace attributes of modules and classes while at least one engine needs them."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

_INHERITED = object()
CLASSES = threading.RLock()
"""Held while classes are patched, and while a library loads a model, which patches them, too."""


class Patches:
    """Replacements of attributes of one object, shared by all engines of the process."""

    def __init__(self, owner: Any, replace: Mapping[str, Callable[[Any], Any]]) -> None:
        """
        Args:
            owner: a module, a class or a function.
            replace: replacements by attribute: makes one from the original value, or from None.
        """
        self._owner, self._replace = owner, dict(replace)
        self._plain: dict[str, Any] = {}
        self._replacements: dict[str, Any] = {}
        self._users = 0

    def add(self) -> None:
        with CLASSES:
            self._users += 1
            if self._users == 1:
                for name, replacement in self._replace.items():
                    self._plain[name] = vars(self._owner).get(name, _INHERITED)
                    self._replacements[name] = replacement(getattr(self._owner, name, None))
                    setattr(self._owner, name, self._replacements[name])

    def drop(self) -> None:
        """Undo one `add`; the last one restores the original values.

        Attributes that other code has replaced or restored meanwhile are left alone: a library
        that loads a model in another thread temporarily replaces methods of the same classes.
        """
        with CLASSES:
            self._users -= 1
            if not self._users:
                for name, value in self._plain.items():
                    if vars(self._owner).get(name) is not self._replacements[name]:
                        continue
                    if value is _INHERITED:
                        delattr(self._owner, name)
                    else:
                        setattr(self._owner, name, value)
                self._plain.clear()
                self._replacements.clear()
