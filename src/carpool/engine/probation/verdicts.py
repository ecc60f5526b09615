"""Evidence that calls fuse, stored between runs in a file next to the learned costs.

Evidence is stored under the identity of its module; a module with another identity starts without
evidence.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins
from torch import nn

from carpool import jsonfile
from carpool.engine import kept_file
from carpool.engine.identity import ModuleIdentities
from carpool.engine.probation.kinds import Evidence

MAX_ENTRIES = 10_000


class Verdicts:
    """The file of one model on one device.

    Args:
        path: the file; None: nothing is stored.
        versions: versions of the libraries that affect answers.
    """

    def __init__(self, path: Path | None, versions: Mapping[str, str] | None = None) -> None:
        self.path, self.identity = path, ModuleIdentities(versions).of
        self._stored = self._read()

    def read(self, identity: str, kind: str) -> Evidence | None:
        """The stored evidence of a kind of call."""
        data = self._stored.get(f"{identity} {kind}")
        return None if data is None else convert(data, Evidence)

    def of(self, module: nn.Module, prefix: str) -> dict[str, Evidence]:
        """The stored evidence of a module's kinds of call with this prefix."""
        begin = f"{self.identity(module)} {prefix}"
        return {
            f"({name.removeprefix(begin)}": convert(data, Evidence)
            for name, data in self._stored.items()
            if name.startswith(begin)
        }

    def keep(self, evidence: Mapping[tuple[str, str], Evidence]) -> None:
        """Replace the file atomically if anything has changed."""
        if self.path is None:
            return
        data = {" ".join(p): to_builtins(e, order="sorted") for p, e in evidence.items()}
        fresh = self._stored | data
        if fresh == self._stored:
            return
        entries = dict(list(fresh.items())[-MAX_ENTRIES:])
        kept_file.write(self.path, {"fusing": entries})
        self._stored = entries

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            entries = jsonfile.loads(kept_file.read(self.path))["fusing"]
            convert(entries, dict[str, Evidence])
            return dict(entries)
        except FileNotFoundError:
            pass
        except Exception as error:  # a damaged file may raise anything
            kept_file.set_aside(self.path, error)
        return {}
