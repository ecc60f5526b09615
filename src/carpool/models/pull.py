"""Download the needed files of a model from the hub, if the disk has room.

huggingface_hub handles progress, resumption and tokens by its own settings. No torch.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from carpool import jsonfile
from carpool.errors import LoadFailed
from carpool.models.published import SHAPE_FILES, shapes_on_hub
from carpool.models.source import INDEXES, SINGLE_FILES, check_hub, class_in, find, hub_errors

_TEXTS = (".json", ".txt", ".model", ".jinja")  # configurations and tokenizers; never code
_PLAIN = re.compile(r"[^.]+\.safetensors(\.index\.json)?")
_SHARE = 1.02  # free space needed per file size: the cache adds metadata


def places(model: str, index: Mapping[str, Any]) -> dict[str, list[str]]:
    """The folders of a pipeline's components by repository, its own first.

    Args:
        index: `model_index.json`; or `modular_model_index.json`, which may name repositories.
    """
    folders: dict[str, list[str]] = {model: []}
    for component, entry in index.items():
        if class_in(entry) is not None:
            options = entry[2] if len(entry) == 3 else {}
            where = str(options.get("pretrained_model_name_or_path") or model)
            folders.setdefault(where, []).append(str(options.get("subfolder") or component))
    return folders


def wanted(files: Iterable[str], folders: Iterable[str], variant: str | None) -> list[str]:
    """The files of a repository that its pipeline needs.

    Args:
        files: paths in the repository.
        folders: folders of the pipeline's components.
        variant: variant of weights, for components that have it; otherwise the plain weights.

    Raises:
        LoadFailed: a component's weights are only pickles, which can run code.
    """
    paths = sorted(files)
    selection: list[str] = [name for name in ("carpool.json", *INDEXES) if name in paths]
    for component in folders:
        inside = [name for name in paths if name.startswith(f"{component}/")]
        texts = [name for name in inside if name.endswith(_TEXTS) and ".safetensors." not in name]
        weights = [name for name in inside if ".safetensors" in name]
        plain = [name for name in weights if _PLAIN.fullmatch(name.rpartition("/")[2])]
        special = [name for name in weights if variant and f".{variant}" in name]
        pickles = [name for name in inside if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if pickles and not (special or plain):
            raise LoadFailed(f"{pickles[0]} may hold a pickle, which can run code, and there is no "
                             f".safetensors of {component}: look for a conversion")  # fmt: skip
        selection += [*texts, *(special or plain)]
    return selection


def pull(model: str, revision: str | None = None, variant: str | None = None) -> Path:
    """Download a model into the hub's cache; cached files are not downloaded again.

    Args:
        model: a hub id, `org/name`, or one file of a repository, `org/name/path`.

    Returns:
        The folder or file in the cache.

    Raises:
        LoadFailed: not available, or too large for the disk; the message has the fix.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    if model.count("/") > 1 and model.endswith(SINGLE_FILES) and not Path(model).exists():
        org, name, file = model.split("/", 2)
        repository = f"{org}/{name}"
        with hub_errors(repository, revision, file):
            download = hf_hub_download(repository, file, revision=revision, dry_run=True)
            _check_disk(model, [download])
            return Path(hf_hub_download(repository, file, revision=revision))
    if (shapes := pull_shapes(model, revision, variant)) is not None:
        return shapes
    source, card = find(model)
    if card:
        return Path(source)
    at = check_hub(model, revision)
    index = jsonfile.loads(jsonfile.read(at))
    if not isinstance(index, dict):
        kind = type(index).__name__
        raise LoadFailed(f"{model}: {at.name} is a {kind}: must be an object")
    every, names = [], {}
    for place, folders in places(model, index).items():
        of = revision if place == model else None
        with hub_errors(place, of, at.name):
            files = {
                download.filename: download
                for download in snapshot_download(place, revision=of, dry_run=True)
            }
        names[place] = wanted(files, folders, variant)
        every += [files[name] for name in names[place]]
    _check_disk(model, every)
    fetched = {}
    for place, patterns in names.items():
        of = revision if place == model else None
        with hub_errors(place, of, at.name):
            fetched[place] = Path(snapshot_download(place, revision=of, allow_patterns=patterns))
    return fetched[model]


def pull_shapes(model: str, revision: str | None, variant: str | None) -> Path | None:
    """Download the Hunyuan3D-2 folder of a hub id; None for other models.

    Raises:
        LoadFailed: not available, or too large for the disk.
    """
    from huggingface_hub import snapshot_download

    if (place := shapes_on_hub(model, variant)) is None:
        return None
    repository, folder = place
    names = [f"{folder}/{name}" for name in SHAPE_FILES]
    with hub_errors(repository, revision, names[0]):
        files = snapshot_download(repository, revision=revision, allow_patterns=names, dry_run=True)
        _check_disk(model, files)
        at = Path(snapshot_download(repository, revision=revision, allow_patterns=names)) / folder
    if not (at / SHAPE_FILES[0]).is_file():
        raise LoadFailed(f"{repository} has no {names[0]}: see its folders hunyuan3d-dit-*")
    return at


def _check_disk(model: str, files: Iterable[Any]) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    fetch_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    folder = next(
        path for path in [Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents] if path.exists()
    )
    free = shutil.disk_usage(folder).free
    if fetch_bytes * _SHARE > free:
        raise LoadFailed(
            f"{model} takes {fetch_bytes / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free: "
            "make room, or set HF_HOME to a larger disk"
        )
