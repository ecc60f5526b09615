"""Find the files of a model: embedded, a folder in diffusers layout, a file, or a hub id.

No torch: `carpool serve` uses it before it starts workers.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from carpool import jsonfile
from carpool.errors import LoadFailed, nearest
from carpool.models import embedded

CARD_FILE = "carpool.json"
"""Optional file next to a local model's `model_index.json`: its public id, default values of
parameters, its largest picture, and the folder of a prompt rewriter: {"id": ...,
"defaults": {...}, "max_pixels": ..., "rewriter": ...}."""

EMBEDDED = {"shapes": embedded.MODEL_DIR, "shapes-video": embedded.VIDEO_MODEL_DIR}

_INDEX = "model_index.json"
INDEXES = (_INDEX, "modular_model_index.json")
"""Index files of pipelines: of their own class, or built from blocks (`ModularPipeline`)."""
LANGUAGE_CONFIG = "config.json"
LANGUAGE_CLASSES = "ForCausalLM", "LMHeadModel", "ForConditionalGeneration"
"""Config file of a transformers model, which has no index."""
SINGLE_FILES = (".safetensors", ".sft", ".gguf", ".pth")
PICKLES = (".ckpt", ".pt", ".bin")


def find(model: str | Path) -> tuple[str, dict[str, Any]]:
    """Find a model; returns the argument of `from_pretrained`, and the content of its card file.

    Raises:
        LoadFailed: no such embedded model or folder, or an invalid card file.
    """
    folder = EMBEDDED.get(str(model)) or Path(model).expanduser()
    if index_of(folder) is not None:
        card = folder / CARD_FILE
        extra = _card(card) if card.is_file() else {}
        lora = {name: folder / str(path) for name, path in extra.get("lora", {}).items()}
        if "rewriter" in extra:
            extra["rewriter"] = folder / extra["rewriter"]
        extra = {"id": folder.resolve().name, **extra, "lora": lora}  # clients never see paths
        return str(folder), extra
    if holds_language_model(folder):
        return str(folder), {"id": folder.resolve().name, "lora": {}}
    text = str(model)
    if is_weights(text) and folder.is_file():
        return str(folder), {"id": folder.stem, "lora": {}}
    if folder.suffix in PICKLES and folder.is_file():
        raise LoadFailed(f"{text!r} may hold a pickle, which can run code: take a .safetensors")
    if hint := _hint(folder.absolute()):
        raise LoadFailed(f"no model at {text!r}: {hint}")
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise LoadFailed(
            f"no model at {text!r}{nearest(text, EMBEDDED)}: give "
            f"{' or '.join(map(repr, EMBEDDED))}, a hub id like 'org/name', a folder that holds "
            f"a {_INDEX} or {INDEXES[1]}, or a language model's {LANGUAGE_CONFIG}, or a file "
            f"({' or '.join(SINGLE_FILES)})"
        )
    return text, {}


def _hint(place: Path) -> str:
    """The nearest model of a place inside a model's folder or the hub's cache."""
    for folder in (place, *place.parents) if place.exists() else ():
        if folder.name.startswith("models--"):
            snapshot = next((at for at in folder.glob("snapshots/*") if index_of(at)), folder)
            name = folder.name.removeprefix("models--").replace("--", "/")
            return f"it is in the hub's cache: give the id {name!r}, or {str(snapshot)!r}"
    is_part = place.exists() and index_of(place.parent) is not None
    return f"it is a part of a model: give {str(place.parent)!r}" if is_part else ""


def is_single_file(source: str) -> bool:
    """Return whether a result of `find` is a single file of weights."""
    return is_weights(source) and Path(source).is_file()


def is_weights(name: str) -> bool:
    """Return whether a file name is one of weights; ignores case."""
    return name.lower().endswith(SINGLE_FILES)


def index_of(folder: Path) -> Path | None:
    """The index file of a pipeline's folder; None if the folder has no pipeline."""
    return next((folder / name for name in INDEXES if (folder / name).is_file()), None)


def holds_language_model(folder: Path) -> bool:
    """Return whether a folder is a transformers language model, not a pipeline."""
    config = folder / LANGUAGE_CONFIG
    if index_of(folder) is not None or not config.is_file():
        return False
    try:
        classes = jsonfile.loads(jsonfile.read(config)).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(name).endswith(LANGUAGE_CLASSES) for name in classes)


def class_in(entry: Any) -> tuple[str, str] | None:
    """Library and class of a component from its entry in an index.

    Entries of modular pipelines also have the component's source and its class there.

    Returns:
        None for a plain value, and for a component that the model lacks.
    """
    if not isinstance(entry, (list, tuple)):
        return None
    names = entry[2].get("type_hint") if len(entry) == 3 and isinstance(entry[2], dict) else entry
    if not isinstance(names, (list, tuple)) or len(names) != 2 or None in names:
        return None
    return str(names[0]), str(names[1])


def components_of(source: str) -> dict[str, str]:
    """The modules of a local pipeline: class names by component; {} if its index lists none."""
    folder = Path(source)
    try:
        index = jsonfile.loads(jsonfile.read(index_of(folder) or folder / _INDEX))
        classes = {name: class_in(entry) for name, entry in index.items()}
    except (OSError, ValueError, AttributeError):
        return {}
    is_module = {name: (folder / name / "config.json").is_file() for name in classes}
    return {name: entry[1] for name, entry in classes.items() if entry and is_module[name]}


def pipeline_of(model: str) -> str:
    """The pipeline class in the index of a local model; "" if unreadable."""
    try:
        folder = Path(find(model)[0])
        index = jsonfile.loads(jsonfile.read(index_of(folder) or folder / _INDEX))
        return str(index["_class_name"])
    except (LoadFailed, OSError, ValueError, LookupError, TypeError):
        return ""


def check_hub(model: str, revision: str | None) -> Path:
    """Check that a hub model is available: download its index, if it is not in the cache.

    Returns:
        The path of its index.

    Raises:
        LoadFailed: the message has the reason: no such model or revision, gated, no network,
            offline mode, or not a diffusers pipeline.
    """
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache

    with hub_errors(model, revision, _INDEX):
        for name in (*INDEXES, LANGUAGE_CONFIG):
            if isinstance(at := try_to_load_from_cache(model, name, revision=revision), str):
                return Path(at)
        reach_hub()
        for name in (*INDEXES, LANGUAGE_CONFIG):
            with suppress(errors.RemoteEntryNotFoundError):
                return Path(hf_hub_download(model, name, revision=revision, etag_timeout=5))
        return Path(hf_hub_download(model, _INDEX, revision=revision, etag_timeout=5))


def hub_has(model: str, file: str) -> bool:
    """Return whether a hub repository has a file; uses the cache if possible.

    Raises:
        LoadFailed: the hub is unreachable or refuses.
    """
    from huggingface_hub import constants, file_exists, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, file), str):
        return True
    if constants.is_offline_mode():
        return False
    with hub_errors(model, None, file):
        reach_hub()
        return file_exists(model, file)


@contextmanager
def hub_errors(model: str, revision: str | None, file: str) -> Iterator[None]:
    """Convert errors of the hub to LoadFailed with a fix.

    Args:
        file: the requested file of the model.

    Raises:
        LoadFailed: the hub refused or is unreachable.
    """
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        yield
    except errors.GatedRepoError as error:
        raise LoadFailed(
            f"{model} is gated: accept its terms at {constants.ENDPOINT}/{model}, then log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise LoadFailed(
            f"the hub has no model {model!r} that this token may see: check the name; for a "
            "private model log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LoadFailed(f"{model} has no revision {revision!r}: see its branches") from error
    except (errors.LocalEntryNotFoundError, _Unreachable) as error:
        if constants.is_offline_mode():
            why = "HF_HUB_OFFLINE is set: unset it"
        else:
            cause = _last_cause(error)
            why = f"{constants.ENDPOINT} cannot be reached ({cause}): check the network"
        raise LoadFailed(
            f"{model}{at} is not in the hub cache ({constants.HF_HUB_CACHE}), and {why}, or fetch "
            f"it elsewhere with `hf download {model}`"
        ) from error
    except errors.EntryNotFoundError as error:
        rule = "it is no diffusers pipeline; look for a conversion, often called NAME-diffusers"
        rule = rule if file == _INDEX else f"see its files at {constants.ENDPOINT}/{model}"
        raise LoadFailed(f"{model}{at} has no {file}: {rule}") from error
    except errors.HFValidationError as error:
        raise LoadFailed(f"no model at {model!r}: {error}") from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise LoadFailed(f"the hub does not give {model}{at}: {_last_cause(error)}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # of its HTTP client
        raise LoadFailed(
            f"the connection to the hub broke while {model}{at} was fetched "
            f"({_last_cause(error)}): try again, it resumes"
        ) from error


def reach_hub() -> None:
    """Check that the hub is reachable, except by a proxy. Call it inside `hub_errors`."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if constants.is_offline_mode() or getproxies().get(parts.scheme):
        return
    try:  # fails fast: the library retries for half a minute
        socket.create_connection((parts.hostname or "", port), timeout=3).close()
    except OSError as error:
        raise _Unreachable from error


class _Unreachable(Exception):
    """The hub does not answer."""


def _last_cause(error: BaseException) -> str:
    """The first line of the root cause's message."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _card(file: Path) -> dict[str, Any]:
    """Read a card file.

    Raises:
        LoadFailed: the file is not a valid card.
    """
    kinds = {"id": str, "defaults": dict, "max_pixels": int, "lora": dict, "rewriter": str}
    try:
        content = jsonfile.loads(jsonfile.read(file))
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise LoadFailed(f"{file} is a {type(content).__name__}: must be an object")
    for name, kind in kinds.items():
        if name in content and type(content[name]) is not kind:
            type_name, rule = type(content[name]).__name__, kind.__name__
            raise LoadFailed(f"{file}: {name} is a {type_name}: must be a {rule}")
    return content
