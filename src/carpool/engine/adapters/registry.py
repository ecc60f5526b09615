"""The adapters available to requests: from settings, from `add`, from the watched folder."""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from carpool.engine.adapters.folder import Folder
from carpool.engine.adapters.hooks import Adapters
from carpool.errors import LoraRejected
from carpool.request.adapter_names import AdapterInfo

log = logging.getLogger("carpool")


class AdapterRegistry:
    """Registers adapters while requests run. For any thread.

    Args:
        adapters: holds the registered adapters.
        folder: the watched folder; None: no folder.
        on_change: called after a change with the ids for requests, and the infos of all adapters,
            including refused ones.
    """

    def __init__(
        self,
        adapters: Adapters,
        folder: str | None,
        on_change: Callable[[tuple[str, ...], tuple[AdapterInfo, ...]], None],
    ) -> None:
        self._adapters, self._on_change = adapters, on_change
        self._folder = Folder(folder, adapters.add)
        self._refused: dict[str, AdapterInfo] = {}  # refused adapters of the settings
        self._reloading = threading.Lock()

    def add(self, name: str, path: str | Path) -> None:
        """Register an adapter; for its errors see `Adapters.add`."""
        self._adapters.add(name, path)
        self._changed()

    def add_all(self, paths: Mapping[str, str | Path], *, is_tolerant: bool) -> None:
        """Register the adapters of the settings.

        Args:
            is_tolerant: an unreadable adapter fails only the requests that name it.
        """
        for name, path in paths.items():
            try:
                self._adapters.add(name, path)
            except LoraRejected as error:
                if not is_tolerant:
                    raise
                log.error("%s", error)
                problem = str(error).removeprefix(f"adapter {name!r}: ")
                self._refused[name] = AdapterInfo(name, problem=problem)
        self._changed()

    def reload(self) -> list[str]:
        """Read the folder again. Returns a line for each problem."""
        with self._reloading:
            problems = self._folder.read()
            self._changed()
        return problems

    def _changed(self) -> None:
        folder, adapters = self._folder, self._adapters
        adapters.notes = folder.changed
        offered = tuple(info.id for info in adapters.infos if info.id not in folder.missing)
        infos = (*adapters.infos, *self._refused.values(), *folder.refused.values())
        self._on_change(offered, infos)
