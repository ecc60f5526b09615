"""Fetch a model from the hub before it is served: what is needed of it, if the disk can hold it.

huggingface_hub does it: progress, resuming, and tokens by its own settings. No torch.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from carpool import jsonfile
from carpool.errors import LoadFailed
from carpool.models.source import SINGLE_FILES, check_hub, find, hub_errors

_TEXTS = (".json", ".txt", ".model", ".jinja")  # configurations and tokenizers; never code
_PLAIN = re.compile(r"[^.]+\.safetensors(\.index\.json)?")
_SHARE = 1.02  # of the files' size that must be free: the cache keeps a little of its own


def wanted(files: Iterable[str], index: Mapping[str, Any], variant: str | None) -> list[str]:
    """The files of a repository that loading its pipeline reads.

    Args:
        files: paths in the repository.
        index: of the pipeline (`model_index.json`).
        variant: of weights, where a component has them; else the plain ones.

    Raises:
        LoadFailed: a component has weights only as pickles, which can run code.
    """
    given = sorted(files)
    found: list[str] = [name for name in ("carpool.json", "model_index.json") if name in given]
    for component, entry in index.items():
        if not isinstance(entry, list) or entry[0] is None:
            continue
        own = [name for name in given if name.startswith(f"{component}/")]
        texts = [name for name in own if name.endswith(_TEXTS) and ".safetensors." not in name]
        weights = [name for name in own if ".safetensors" in name]
        plain = [name for name in weights if _PLAIN.fullmatch(name.rpartition("/")[2])]
        special = [name for name in weights if variant and f".{variant}" in name]
        pickles = [name for name in own if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if pickles and not (special or plain):
            raise LoadFailed(f"{pickles[0]} may hold a pickle, which can run code, and there is no "
                             f".safetensors of {component}: look for a conversion")  # fmt: skip
        found += [*texts, *(special or plain)]
    return found


def pull(model: str, revision: str | None = None, variant: str | None = None) -> Path:
    """Fetch a model into the hub's cache; what is there already is not fetched again.

    Args:
        model: a hub id, `org/name`, or one file of a repository, `org/name/path`.

    Returns:
        Where it is.

    Raises:
        LoadFailed: it is not to be had, or does not fit the disk; says what to do.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    if model.count("/") > 1 and model.endswith(SINGLE_FILES) and not Path(model).exists():
        org, name, file = model.split("/", 2)
        repository = f"{org}/{name}"
        with hub_errors(repository, revision, file):
            one = hf_hub_download(repository, file, revision=revision, dry_run=True)
            _check_disk(model, [one])
            return Path(hf_hub_download(repository, file, revision=revision))
    source, card = find(model)
    if card:
        return Path(source)
    check_hub(model, revision)
    with hub_errors(model, revision, "model_index.json"):
        index = jsonfile.loads(
            jsonfile.read(Path(hf_hub_download(model, "model_index.json", revision=revision)))
        )
        if not isinstance(index, dict):
            kind = type(index).__name__
            raise LoadFailed(f"{model}: model_index.json is a {kind}: must be an object")
        files = {
            one.filename: one for one in snapshot_download(model, revision=revision, dry_run=True)
        }
        names = wanted(files, index, variant)
        _check_disk(model, [files[name] for name in names])
        return Path(snapshot_download(model, revision=revision, allow_patterns=names))


def _check_disk(model: str, files: Iterable[Any]) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    needed = sum(one.file_size or 0 for one in files if one.will_download)
    folder = next(one for one in [Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents] if one.exists())
    free = shutil.disk_usage(folder).free
    if needed * _SHARE > free:
        raise LoadFailed(
            f"{model} takes {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free: make "
            "room, or set HF_HOME to a larger disk"
        )
