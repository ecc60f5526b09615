"""Evidence of how calls fuse, kept between runs in a file beside the learned costs.

Evidence counts for the code that it was found with: it is kept under a digest of the source of the
module's classes, its config and the versions of the libraries, and anything else begins anew.
"""

import hashlib
import inspect
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carpool import jsonfile
from carpool.engine import kept_file
from carpool.engine.foreign_code import foreign_parts
from carpool.errors import show

MAX_ENTRIES = 10_000


class Verdicts:
    """The file of one model on one device.

    Args:
        path: of the file; None: nothing is kept.
        versions: of the libraries that answers depend on.
    """

    def __init__(self, path: Path | None, versions: Mapping[str, str] | None = None) -> None:
        self.path, self._versions = path, dict(versions or {})
        self._identities: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str]]
        self._identities = weakref.WeakKeyDictionary()
        self._sources: dict[Any, str] = {}
        self._known = self._read()

    def identity(self, module: nn.Module) -> str:
        """A digest of all that a module's answers depend on, beside its weights and inputs."""
        classes = [type(part) for part in module.modules()]
        processors = [
            *(type(part.processor) for part in module.modules() if hasattr(part, "processor")),
            *foreign_parts(module),
        ]
        state = (tuple(classes), tuple(processors), module.training)
        known = self._identities.get(module)
        if known is not None and known[0] == state:
            return known[1]
        digest = hashlib.blake2b(digest_size=12)
        for one in dict.fromkeys((*classes, *processors)):
            digest.update(self._source(one).encode())
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            config = config.to_dict()
        weights = {str(one.dtype) for one in module.parameters()}
        threads, device = torch.get_num_threads(), {str(one.device) for one in module.parameters()}
        said = (config, self._versions, sorted(weights), threads, sorted(device), module.training)
        digest.update(json.dumps(said, sort_keys=True, default=str).encode())
        name = digest.hexdigest()
        self._identities[module] = (state, name)
        return name

    def _source(self, cls: Any) -> str:
        if cls not in self._sources:
            try:
                text = inspect.getsource(inspect.getmodule(cls) or cls)
            except (OSError, TypeError):
                text = ""  # made at run time
            self._sources[cls] = f"{cls.__module__}.{cls.__qualname__}:" + (
                hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
            )
        return self._sources[cls]

    def read(self, identity: str, kind: str) -> Mapping[str, Any] | None:
        """The stored evidence of a kind of call."""
        return self._known.get(f"{identity} {kind}")

    def of(self, module: nn.Module, prefix: str) -> dict[str, Mapping[str, Any]]:
        """The stored evidence of a module's kinds of call that begin so."""
        begin = f"{self.identity(module)} {prefix}"
        return {
            f"({name.removeprefix(begin)}": data
            for name, data in self._known.items()
            if name.startswith(begin)
        }

    def keep(self, evidence: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
        """Write the file anew if anything has changed, so that it is the old one or the new one."""
        if self.path is None:
            return
        fresh = self._known | {f"{one} {kind}": data for (one, kind), data in evidence.items()}
        if fresh == self._known:
            return
        kept = dict(list(fresh.items())[-MAX_ENTRIES:])
        kept_file.write(self.path, {"fusing": kept})
        self._known = kept

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            known = jsonfile.loads(kept_file.read(self.path))["fusing"]
            for name, value in known.items():
                if not _is_evidence(value):
                    raise ValueError(f"{show(name)} has no evidence")
            return dict(known)
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever a damaged file makes of it
            kept_file.set_aside(self.path, error)
        return {}


def _is_evidence(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "alone" in value:
        return isinstance(value["alone"], str)
    lists = [value.get(name) for name in ("sizes", "widths", "varied", "shared")]
    if not all(isinstance(one, list) and all(isinstance(n, str) for n in one) for one in lists):
        return False
    return type(value.get("agreed")) is int and value["agreed"] >= 0
