"""Learned costs on disk: one file a model, revision, device, number type and library versions.

A table is a prior of the next run, not a truth. It says when it was learned, and how fast the
machine was then; an old one, or one of other versions, counts for less.
"""

import hashlib
import json
import logging
import os
import threading
import time
from pathlib import Path

from carpool import jsonfile
from carpool.config import EngineSettings
from carpool.engine.model.fingerprint import fingerprint
from carpool.engine.model.load import LoadedPipeline, versions
from carpool.schedule.cost import Costs
from carpool.schedule.learned_curve import PRIOR
from carpool.types import Clock

log = logging.getLogger("carpool")

MUST_BE_SAME = ("model", "revision", "device", "threads", "dtype", "prepared")
OTHER_VERSIONS = 0.3  # of torch, diffusers...: what a table is worth then
HALF_LIFE_DAYS = 30.0
UNKNOWN_AGE = 0.5
LEAST = 0.2


class StoredCosts:
    """The costs of one model on one device, and the file that they are kept in."""

    def __init__(
        self, loaded: LoadedPipeline, settings: EngineSettings, *, wall_clock: Clock = time.time
    ) -> None:
        self._wall_clock, device = wall_clock, loaded.device
        self._identity = {
            "model": loaded.source,
            "revision": settings.revision,
            "device": device.name,
            "threads": None if device.is_accelerator else os.environ.get("OMP_NUM_THREADS"),
            "dtype": str(device.dtype),
            "prepared": fingerprint(loaded),
            **versions(),
        }
        self.path = Path(settings.cost_table) if settings.cost_table else self._default()
        self._is_ours = not settings.cost_table  # else the user may have named any file
        self.costs = self._read()

    def _default(self) -> Path:
        """A file of the user's cache folder, as the XDG base directory specification has it."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        return cache / "carpool" / f"costs-{digest[:16]}.json"

    def _read(self) -> Costs:
        try:
            text = jsonfile.read(self.path)
            self._is_ours |= not text  # nothing can be lost
            data = jsonfile.loads(text)
            identity, costs = data["identity"], data["costs"]
            self._is_ours = True
            same = [name for name in MUST_BE_SAME if identity.get(name) == self._identity[name]]
            if len(same) == len(MUST_BE_SAME):
                weight = PRIOR * self._trust(identity, data.get("learned_unix_s"))
                return Costs.from_json(costs, weight=weight)
            log.info("%s was measured with something else: it begins anew", self.path)
        except FileNotFoundError:
            self._is_ours = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = "begins anew" if self._is_ours else "stays as it is; what is learned is not kept"
            log.warning("%s is no table of costs, and %s: %s", self.path, what, error)
        return Costs()

    def _trust(self, identity: object, learned_unix_s: object) -> float:
        """How much a table is worth, in parts of a fresh one of the same versions."""
        known = OTHER_VERSIONS if identity != self._identity else 1.0
        if not isinstance(learned_unix_s, (int, float)):
            return known * UNKNOWN_AGE
        days = max(0.0, self._wall_clock() - learned_unix_s) / 86400
        return known * max(LEAST, float(0.5 ** (days / HALF_LIFE_DAYS)))

    def keep(self) -> None:
        """Write the file, so that it is either the old one or the new one; never over another's."""
        if not self._is_ours:
            return
        data = {
            "identity": self._identity,
            "learned_unix_s": self._wall_clock(),
            "speed_factor": self.costs.factor,
            "costs": self.costs.to_json(),
        }
        # two engines of one process may have the same file
        fresh = self.path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(data, indent=1) + "\n")
            os.replace(fresh, self.path)
        except OSError as error:
            log.warning("what was learned is not kept: %s", error)
