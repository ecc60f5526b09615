"""The adapters that requests may name: from settings, from `add`, from the watched folder."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from carpool.engine.adapters.folder import Folder
from carpool.engine.adapters.hooks import Adapters


class AdapterRegistry:
    """Registers adapters while requests run. For any thread.

    Args:
        adapters: where they are added.
        folder: to watch; None: there is none.
        on_change: called with the names that requests may use, when these have changed.
    """

    def __init__(
        self, adapters: Adapters, folder: str | None, on_change: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._adapters, self._on_change = adapters, on_change
        self._folder = Folder(folder, adapters.add)
        self._reloading = threading.Lock()

    def add(self, name: str, path: str | Path) -> None:
        """Register an adapter; see `Adapters.add` for what it raises."""
        self._adapters.add(name, path)
        self._changed()

    def add_all(self, paths: Mapping[str, str | Path]) -> None:
        for name, path in paths.items():
            self.add(name, path)

    def reload(self) -> list[str]:
        """Read the folder again. Returns what could not be taken, one line each."""
        with self._reloading:
            problems = self._folder.read()
            self._changed()
        return problems

    def _changed(self) -> None:
        hidden = self._folder.hidden
        self._on_change(tuple(name for name in self._adapters.names if name not in hidden))
