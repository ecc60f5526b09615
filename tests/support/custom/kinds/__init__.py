"""All kinds, by where their state lies or what they do to the process."""

import importlib

from support.custom.base import KINDS

FILES = (
    *("own_state", "outside", "forwards", "remembering", "patched_nets", "accelerators"),
    *("callbacks", "modes", "weights", "blocking", "draws", "structures", "endings"),
)
for _file in FILES:  # each adds its kinds
    importlib.import_module(f"{__name__}.{_file}")

__all__ = ["KINDS"]
