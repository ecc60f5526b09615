"""Find damaged files in a model folder, from broken downloads, full disks and partial copies.

It runs after a failed load, because libraries often name neither the file nor the problem. It reads
only the headers of safetensors files.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carpool.models.source import INDEXES, SINGLE_FILES

_MOST_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_POINTER = b"version https://git-lfs.github.com/spec/"
_OBJECTS = ("config.json", "_index.json", ".index.json", "special_tokens_map.json")  # suffixes
_KINDS = (".json", SINGLE_FILES[0], ".txt", ".model")


def damage_in(place: Path) -> str | None:
    """Describe the first damaged file in the folder of a pipeline or a component.

    Args:
        place: a folder, or one file.

    Returns:
        A line with the file and the fix; None if no file is damaged.
    """
    for file in sorted(_files(place)):
        name = file.relative_to(place) if file != place else file.name
        try:
            problem = problem_of(file)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if problem is not None:
            return f"{name} {problem}: download or copy it again"
    return _missing_from(place)


def _missing_from(folder: Path) -> str | None:
    """Describe the first component that differs from the index of its pipeline, or is missing."""
    if "_class_name" not in (index := _content(folder / INDEXES[0])):
        return f"{INDEXES[0]} names no _class_name" if index else None
    for name, entry in index.items():
        if not isinstance(entry, list) or not all(isinstance(part, str) for part in entry):
            continue
        part, config = folder / name, folder / name / "config.json"
        if not part.exists():
            return f"{name} is missing, which {INDEXES[0]} names: download or copy it again"
        if not config.exists() and any(part.glob("*.safetensors")):
            return f"{name}/config.json is missing: download or copy it again"
        if (cls := _content(config).get("_class_name", entry[-1])) != entry[-1]:
            return f"{name}/config.json is of {cls}, and {INDEXES[0]} names {entry[-1]}"
    return None


def _files(place: Path) -> Iterator[Path]:
    """The files of a folder, and of the sub-folders in its index."""
    if not place.is_dir():
        yield place
        return
    names = next((names for index in INDEXES if (names := _content(place / index))), {})
    for folder in (place, *(place / name for name in names if (place / name).is_dir())):
        yield from (file for file in folder.iterdir() if file.suffix.lower() in _KINDS)


def _content(file: Path) -> dict[str, Any]:
    """An object of JSON; empty if the file has none."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def problem_of(file: Path) -> str | None:
    """Describe the damage of one file; None if no damage is visible."""
    if not file.exists():
        return f"is a link to {os.readlink(file)}, which does not exist"
    if file.is_dir():
        return "is a folder, and must be a file"
    with file.open("rb") as opened:
        begin = opened.read(len(_POINTER))
    if not begin:
        return "is empty"
    if begin.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page and not the file itself (the download may need a login)"
    if begin == _POINTER:
        return "is a pointer of Git LFS and not the file itself (`git lfs pull` fetches that)"
    if file.suffix.lower() == SINGLE_FILES[0]:
        return _problem_of_weights(file)
    return _problem_of_json(file) if file.suffix.lower() == ".json" else None


def _problem_of_weights(file: Path) -> str | None:
    """Describe the damage of a safetensors file, by its header; None if it is whole."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if length <= _MOST_HEADER_BYTES else b""
    if len(text) < length <= _MOST_HEADER_BYTES and text[:1] in (b"{", b""):
        return f"is cut off: it has {size} bytes, and its header alone {length + 8}"
    try:
        entries = json.loads(text)
        ends = [spec["data_offsets"][1] for name, spec in entries.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "is no safetensors file"
    if size < whole:
        return f"is cut off: it has {size} bytes of {whole}"
    return None if size == whole else f"has {size} bytes, and its header says {whole}"


def _problem_of_json(file: Path) -> str | None:
    try:
        content = json.loads(file.read_bytes().decode())
    except UnicodeDecodeError:
        return "is no UTF-8, as JSON has to be"
    except RecursionError:
        return "nests too deep"
    except ValueError as error:
        return f"is no JSON ({error})"
    if not isinstance(content, dict):
        is_object = file.name.endswith(_OBJECTS)
        return f"holds a {type(content).__name__}, and must hold an object" if is_object else None
    return _problem_of_index(file, content) if file.name.endswith(".index.json") else None


def _problem_of_index(file: Path, index: dict[str, Any]) -> str | None:
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        return "has no weight_map from names to files"
    missing = sorted(name for name in set(shards.values()) if not (file.parent / name).exists())
    rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"names {missing[0]}{rest}, which does not exist" if missing else None
