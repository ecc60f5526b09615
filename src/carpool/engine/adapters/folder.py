"""The folder of adapters that is read again while the engine runs (`--lora-dir`).

New files become adapters. Those whose files are gone are not offered any more, but requests that
have them go on. A name always means the same weights: a file that was changed is a problem,
not another adapter.
"""

from collections.abc import Callable
from pathlib import Path

from carpool.errors import LoraRejected
from carpool.request.lora import files_in

Stamp = tuple[int, int]
"""What tells a file from its earlier self: its size, and when it was written, ns."""


class Folder:
    """Which adapters of a folder are registered, and which are offered."""

    def __init__(self, path: str | None, add: Callable[[str, Path], None]) -> None:
        """A folder that was not read yet.

        Args:
            path: None: there is none.
            add: registers an adapter; raises `LoraRejected`.
        """
        self._path, self._add = path, add
        self._known: dict[str, Stamp] = {}
        self.hidden: frozenset[str] = frozenset()  # registered, but gone

    def read(self) -> list[str]:
        """Register what is new and hide what is gone; gives what could not be taken."""
        if self._path is None:
            return []
        problems: list[str] = []
        try:
            found = files_in(Path(self._path))
            stamps = {name: _stamp(file) for name, file in found.items()}
        except OSError as error:
            return [f"lora_dir={self._path!r} cannot be read: {error}"]
        for name, file in found.items():
            if name not in self._known:
                try:
                    self._add(name, file)
                    self._known[name] = stamps[name]
                except LoraRejected as error:
                    problems.append(str(error))
            elif stamps[name] != self._known[name]:
                problems.append(
                    f"adapter {name!r}: its file was changed; give the new one another name, or "
                    "start again"
                )
        self.hidden = frozenset(name for name in self._known if name not in found)
        return problems


def _stamp(file: Path) -> Stamp:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns
