"""The folder of adapters, reloaded while the engine runs (`--lora-dir`).

New files become adapters. Adapters with deleted files are no longer offered, but requests that use
them continue. A name means the same weights until the engine ends: a changed file is reported, and
not reloaded. A file that cannot be read is refused; the others are read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.error_text import reason
from carpool.errors import LoraRejected
from carpool.request.adapter_files import AdapterFile, files_in
from carpool.request.adapter_names import AdapterInfo

Stamp = tuple[int, int]
"""A file's size and modification time, ns: to detect a changed file."""

_CHANGED = (
    "its file was changed after it was read, and the earlier weights are used: give the new file "
    "another name, or start again"
)


class Folder:
    """The state of a folder's adapters: registered, offered, or refused.

    Attributes:
        missing: ids of registered adapters with deleted files.
        changed: warnings for requests whose adapters' files were changed, by id.
        refused: files that are no adapters for this model, by their would-be id.
    """

    def __init__(self, path: str | None, add: Callable[[str, Path, Sequence[str]], None]) -> None:
        """Create the folder's state; `read` fills it.

        Args:
            path: None: no folder.
            add: registers an adapter under an id and other names; raises `LoraRejected`.
        """
        self._path, self._add = path, add
        self._registered: dict[str, Stamp] = {}
        self.missing: frozenset[str] = frozenset()
        self.changed: dict[str, str] = {}
        self.refused: dict[str, AdapterInfo] = {}

    def read(self) -> list[str]:
        """Register new files and hide deleted ones; returns a line for each problem."""
        if self._path is None:
            return []
        try:
            files = {file.id: file for file in files_in(Path(self._path))}
        except OSError as error:
            return [f"lora_dir={self._path!r} cannot be read: {error}"]
        refused, changed = dict[str, AdapterInfo](), dict[str, str]()
        for id_, file in files.items():
            if problem := self._read(file, changed):
                refused[id_] = AdapterInfo(id_, file.names, problem=problem)
        self.refused, self.changed = refused, changed
        self.missing = frozenset(id_ for id_ in self._registered if id_ not in files)
        problems = {id_: info.problem for id_, info in refused.items()} | changed
        return [f"adapter {id_!r}: {text}" for id_, text in problems.items()]

    def _read(self, file: AdapterFile, changed: dict[str, str]) -> str:
        """Register a new file, or record a change; returns the problem, or ""."""
        id_ = file.id
        if file.problem:
            return file.problem
        try:
            stamp = _stamp(file.path)
            if id_ in self._registered:
                if stamp != self._registered[id_]:
                    changed[id_] = _CHANGED
                return ""
            self._add(id_, file.path, file.names)
            self._registered[id_] = stamp
            return ""
        except LoraRejected as error:
            return str(error).removeprefix(f"adapter {id_!r}: ")
        except Exception as error:  # continue with the other files
            return f"{file.path.name} cannot be read: {reason(error)}"


def _stamp(file: Path) -> Stamp:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns
