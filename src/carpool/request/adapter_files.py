"""The files of a folder of adapters."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from carpool.request.adapter_names import adapter_id, names_of
from carpool.request.lora import STANDARD, SUFFIX

PICKLES = (".ckpt", ".pt", ".pth", ".bin")
MAX_DEPTH, MAX_FILES = 8, 10_000  # above any real collection, below a wrong folder such as /


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A file of the folder that is an adapter, or looks like an adapter."""

    id: str
    names: tuple[str, ...]
    path: Path
    problem: str = ""  # why it is not usable


def files_in(folder: Path) -> list[AdapterFile]:
    """The adapters of a folder and its sub-folders, sorted by path, with unique ids.

    Pickles come last, and a pickle next to its conversion is omitted.

    A file with a trainer's standard name gets the name of its folder.

    Raises:
        OSError: the folder cannot be read.
    """
    root = folder.expanduser()
    if not root.exists():
        return []
    os.scandir(root).close()  # `walk` would skip it silently
    ids: dict[str, AdapterFile] = {}
    for path in sorted(_walk(root), key=lambda path: (path.suffix.lower() in PICKLES, path)):
        parts = path.relative_to(root).parts
        stem = path.name[: -len(path.suffix)]
        name_parts = parts[:-1] if stem in STANDARD and len(parts) > 1 else (*parts[:-1], stem)
        is_pickle = path.suffix.lower() in PICKLES
        id_ = adapter_id("/".join(name_parts))
        if id_ in ids:  # for example two files that differ in the suffix
            if is_pickle:
                continue
            digest = blake2b(os.fsencode("/".join(parts)), digest_size=3).hexdigest()
            id_ = f"{id_[:57]}-{digest}"
        problem = f"{path.name} is a pickle, which can run code: convert it to {SUFFIX}"
        ids[id_] = AdapterFile(id_, names_of(name_parts), path, problem if is_pickle else "")
    return list(ids.values())


def _walk(root: Path) -> Iterator[Path]:
    visited: set[str] = set()
    count = 0
    for place, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(place)
        depth = len(Path(place).relative_to(root).parts)
        if real in visited or depth > MAX_DEPTH:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if name.startswith(".") or not name.lower().endswith((SUFFIX, *PICKLES)):
                continue
            count += 1
            if count > MAX_FILES:
                raise OSError(f"more than {MAX_FILES} adapters: is it the right folder?")
            yield Path(place, name)
