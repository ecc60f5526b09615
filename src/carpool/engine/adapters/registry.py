"""The adapters available to requests: from settings, from `add`, from the folder `--lora-dir`.

The folder is read again while the engine runs. New files become adapters. Adapters with deleted
files are no longer offered, but requests that use them continue. A name means the same weights
until the engine ends: a changed file is reported, and not reloaded. A file that cannot be read is
refused; the others are read.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from carpool.engine.adapters.hooks import Adapters
from carpool.engine.weights.sample import digest_of
from carpool.error_text import reason
from carpool.errors import LoraRejected
from carpool.request.adapter_files import AdapterFile, files_in
from carpool.request.adapter_names import AdapterInfo

log = logging.getLogger("carpool")

_CHANGED = (
    "its file was changed after it was read, and the earlier weights are used: give the new file "
    "another name, or start again"
)


class AdapterRegistry:
    """Registers adapters while requests run. For any thread.

    Args:
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
        self._adapters, self._path, self._on_change = adapters, folder, on_change
        self._refused: dict[str, AdapterInfo] = {}  # refused adapters of the settings
        self._refused_files: dict[str, AdapterInfo] = {}  # refused files of the folder, by id
        self._stamps: dict[str, tuple[int, int]] = {}  # sizes and times (ns) of the files read
        self._missing: frozenset[str] = frozenset()  # ids with deleted files
        self._reloading = threading.Lock()

    def add(self, name: str, path: str | Path) -> None:
        """Register an adapter; for its errors see `Adapters.add`."""
        self._adapters.add(name, path)
        self._changed()

    def add_all(self, paths: Mapping[str, str | Path], *, is_tolerant: bool) -> None:
        """Register those of the settings; if tolerant, an unreadable one fails its requests."""
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
            problems = [] if self._path is None else self._read(self._path)
            self._changed()
        return problems

    def _changed(self) -> None:
        infos = self._adapters.infos
        offered = tuple(info.id for info in infos if info.id not in self._missing)
        self._on_change(offered, (*infos, *self._refused.values(), *self._refused_files.values()))

    def _read(self, folder: str) -> list[str]:
        """Register new files and hide deleted ones; returns a line for each problem."""
        try:
            files = {file.id: file for file in files_in(Path(folder))}
        except OSError as error:
            return [f"lora_dir={folder!r} cannot be read: {error}"]
        problems = {id_: problem for id_, file in files.items() if (problem := self._take(file))}
        self._adapters.notes = {id_: text for id_, text in problems.items() if text == _CHANGED}
        self._refused_files = {
            id_: AdapterInfo(id_, files[id_].names, problem=text)
            for id_, text in problems.items()
            if text != _CHANGED
        }
        self._missing = frozenset(id_ for id_ in self._stamps if id_ not in files)
        return [f"adapter {id_!r}: {text}" for id_, text in problems.items()]

    def _take(self, file: AdapterFile) -> str:
        """Register a new file; returns its problem, or ""."""
        if file.problem:
            return file.problem
        try:
            stat = file.path.stat()
            stamp = stat.st_size, stat.st_mtime_ns
            if file.id not in self._stamps:
                self._adapters.add(file.id, file.path, file.names)
            elif stamp != self._stamps[file.id]:
                digests = {info.id: info.digest for info in self._adapters.infos}
                if digests[file.id] != digest_of(file.path):
                    return _CHANGED
            self._stamps[file.id] = stamp
            return ""
        except LoraRejected as error:
            return str(error).removeprefix(f"adapter {file.id!r}: ")
        except Exception as error:  # continue with the other files
            return f"{file.path.name} cannot be read: {reason(error)}"
