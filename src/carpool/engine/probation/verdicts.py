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
        self._stored = self._read()

    def identity(self, module: nn.Module) -> str:
        """A digest of all that a module's answers depend on, beside its weights and inputs."""
        classes = [type(part) for part in module.modules()]
        processors = [
            *(type(part.processor) for part in module.modules() if hasattr(part, "processor")),
            *foreign_parts(module),
        ]
        state = (tuple(classes), tuple(processors), module.training)
        state_and_name = self._identities.get(module)
        if state_and_name is not None and state_and_name[0] == state:
            return state_and_name[1]
        digest = hashlib.blake2b(digest_size=12)
        for code in dict.fromkeys((*classes, *processors)):
            digest.update(self._source(code).encode())
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            config = config.to_dict()
        weights = {str(w.dtype) for w in module.parameters()}
        threads, device = torch.get_num_threads(), {str(w.device) for w in module.parameters()}
        setup = (config, self._versions, sorted(weights), threads, sorted(device), module.training)
        digest.update(json.dumps(setup, sort_keys=True, default=str).encode())
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
        return self._stored.get(f"{identity} {kind}")

    def of(self, module: nn.Module, prefix: str) -> dict[str, Mapping[str, Any]]:
        """The stored evidence of a module's kinds of call that begin so."""
        begin = f"{self.identity(module)} {prefix}"
        return {
            f"({name.removeprefix(begin)}": data
            for name, data in self._stored.items()
            if name.startswith(begin)
        }

    def keep(self, evidence: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
        """Write the file anew if anything has changed, so that it is the old one or the new one."""
        if self.path is None:
            return
        fresh = self._stored | {" ".join(place): data for place, data in evidence.items()}
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
            for name, value in entries.items():
                if not _is_evidence(value):
                    raise ValueError(f"{show(name)} has no evidence")
            return dict(entries)
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever a damaged file makes of it
            kept_file.set_aside(self.path, error)
        return {}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_evidence(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "alone" in value:
        return isinstance(value["alone"], str)
    lists = [value.get(name) for name in ("sizes", "widths", "varied", "shared")]
    if not all(isinstance(names, list) and all(map(_is_text, names)) for names in lists):
        return False
    return type(value.get("agreed")) is int and value["agreed"] >= 0
