"""What is reported of a pretended device: what made the host wait, what lay in the wrong place."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

_PACKAGES = ("carpool", "carpool_lab", "diffusers", "transformers", "accelerate", "peft")
_HERE = str(Path(__file__).parent)
_WRAPPERS = ("carpool/engine/pinned_copies.py", "carpool/engine/random_state.py")
"""Functions of torch as fibers see them: what they do is their callers' doing."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A place in the code that made the host wait for the device."""

    owner: str  # "carpool", "scheduler", "pipeline" or "model"
    kind: str  # "item", "copy to host", ...
    where: str  # file, line and function; ours without the line, which changes with every edit


class Report:
    """Counts until the next `clear`."""

    def __init__(self) -> None:
        self.syncs: Counter[Site] = Counter()
        self.copies: Counter[Site] = Counter()  # host to device that wait for nothing
        self.mismatches: Counter[str] = Counter()
        self._is_on = True

    def clear(self) -> None:
        self.syncs.clear()
        self.copies.clear()
        self.mismatches.clear()

    def sync(self, kind: str) -> None:
        if self._is_on:
            self.syncs[_site(kind)] += 1

    def copy(self, kind: str) -> None:
        if self._is_on:
            self.copies[_site(kind)] += 1

    def mismatch(self, what: str) -> None:
        self.mismatches[f"{what} at {_site('').where}"] += 1

    @contextmanager
    def off(self) -> Iterator[None]:
        """What happens inside is the test's own doing."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before


REPORT = Report()


def here() -> str:
    """The innermost line of a library or of the engine, or of a test."""
    return _site("").where


def _site(kind: str) -> Site:
    frame: FrameType | None = sys._getframe(1)
    owner, inner = "", ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_HERE):
            if (name := _in_package(file)) in _WRAPPERS:
                pass
            elif name is not None:
                line = "" if name.startswith("carpool") else f":{frame.f_lineno}"
                inner = inner or f"{name}{line} {frame.f_code.co_name}"
                owner = owner or _owner(name)
                if owner:
                    break
            elif not inner and "/torch/" not in file:
                inner = f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return Site(owner or "other", kind, inner)


@cache
def _in_package(file: str) -> str | None:
    """The path of a file from the package on."""
    parts = Path(file).parts
    for package in _PACKAGES:
        for i, part in enumerate(parts[1:-1], 1):
            if part == package and parts[i - 1] in ("site-packages", "src"):
                return "/".join(parts[i:])
    return None


def _owner(name: str) -> str:
    if name.startswith("carpool"):
        return "carpool"
    for word, owner in (("schedulers/", "scheduler"), ("pipelines/", "pipeline")):
        if name.startswith(f"diffusers/{word}"):
            return owner
    if name.startswith(("diffusers/models/", "transformers/")):
        return "model"
    return ""  # helpers of the libraries: their caller is meant
