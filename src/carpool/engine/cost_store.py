"""Learned costs on disk: one file per model, revision, device, dtype and library versions.

A table is a prior for the next run, not a truth; one of other library versions has less weight.
"""

import hashlib
import json
import logging
import os
import re
from pathlib import Path

from carpool import jsonfile
from carpool.config import EngineSettings
from carpool.engine import kept_file
from carpool.engine.identity import identity_of_costs
from carpool.engine.model.loaded import LoadedPipeline
from carpool.errors import named
from carpool.schedule.cost import Costs

log = logging.getLogger("carpool")

MUST_BE_SAME = ("format", "model", "revision", "device", "threads", "dtype", "prepared")
OTHER_VERSIONS = 0.3  # weight of a table of other library versions
_BEGIN = b'{\n "identity": '  # start of every table written here


class StoredCosts:
    """The costs of one model on one device, and their file."""

    def __init__(self, loaded: LoadedPipeline, settings: EngineSettings) -> None:
        self._identity = identity_of_costs(loaded, settings.revision)
        self.path = Path(settings.cost_table) if settings.cost_table else self._default()
        self._is_ours = not settings.cost_table  # else the user may have named any file
        self.costs = self._read()

    def _default(self) -> Path:
        """The default file, in the user's cache folder by the XDG base directory specification."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        return cache / "carpool" / f"costs-{digest[:16]}.json"

    def _read(self) -> Costs:
        content: bytes | None = None
        try:
            content = kept_file.read(self.path)
            data = jsonfile.loads(content)
            identity, costs = data["identity"], data["costs"]
            self._is_ours = True
            if all(identity.get(name) == self._identity[name] for name in MUST_BE_SAME):
                weight = 1.0 if identity == self._identity else OTHER_VERSIONS
                return Costs.from_json(costs, weight=weight)
            log.info("%s was measured under other conditions: it starts empty", self.path)
        except FileNotFoundError:
            self._is_ours = True
        except Exception as error:  # a damaged file may raise anything
            self._is_ours |= content is not None and _was_a_table(content)
            if self._is_ours:
                kept_file.set_aside(self.path, error)
            else:
                log.warning(
                    "%s is no table of costs, and stays as it is; learned costs are not stored: %s",
                    self.path, named(error),
                )  # fmt: skip
        return Costs()

    def keep(self) -> None:
        """Replace the file atomically; never overwrite a file of another kind."""
        if not self._is_ours:
            return
        data = {
            "identity": self._identity,
            "speed_factor": self.costs.slowdown,
            "costs": self.costs.to_json(),
        }
        kept_file.write(self.path, data)


def _was_a_table(content: bytes) -> bool:
    """Whether an unreadable file starts like a table, or is empty."""
    is_empty = not content.strip(b"\0 \r\n\t")  # a power failure may leave zeros
    return is_empty or _BEGIN.startswith(content) or bool(re.match(rb'\s*{\s*"identity"', content))
