"""Where a model's files lie: an embedded one, a folder in diffusers layout, a file, or a hub id.

No torch: `carpool serve` asks before it starts anything.
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
"""Optional, beside a local model's `model_index.json`: its public id, values for what requests
leave out, its largest picture, and the folder of a model that writes prompts anew: {"id": ...,
"defaults": {...}, "max_pixels": ..., "rewriter": ...}."""

EMBEDDED = {"shapes": embedded.MODEL_DIR, "shapes-video": embedded.VIDEO_MODEL_DIR}

_INDEX = "model_index.json"
INDEXES = (_INDEX, "modular_model_index.json")
"""Of pipelines: of a class of their own, or put together from blocks (`ModularPipeline`)."""
LANGUAGE_CONFIG = "config.json"
"""Of a model of transformers, which has no index."""
SINGLE_FILES = (".safetensors", ".sft", ".gguf", ".pth")
PICKLES = (".ckpt", ".pt", ".bin")


def find(model: str | Path) -> tuple[str, dict[str, Any]]:
    """Find a model: what `from_pretrained` takes, and what its card file says.

    Raises:
        LoadFailed: no such embedded model or folder, or its card file is none.
    """
    folder = EMBEDDED.get(str(model)) or Path(model).expanduser()
    if index_of(folder) is not None:
        card = folder / CARD_FILE
        extra = _card(card) if card.is_file() else {}
        lora = {name: folder / str(path) for name, path in extra.get("lora", {}).items()}
        if "rewriter" in extra:
            extra["rewriter"] = folder / extra["rewriter"]
        extra = {"id": folder.resolve().name, **extra, "lora": lora}  # never a path to clients
        return str(folder), extra
    if holds_language_model(folder):
        return str(folder), {"id": folder.resolve().name, "lora": {}}
    text = str(model)
    if is_weights(text) and folder.is_file():
        return str(folder), {"id": folder.stem, "lora": {}}
    if folder.suffix in PICKLES and folder.is_file():
        raise LoadFailed(f"{text!r} may hold a pickle, which can run code: take a .safetensors")
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise LoadFailed(
            f"no model at {text!r}{nearest(text, EMBEDDED)}: give "
            f"{' or '.join(map(repr, EMBEDDED))}, a hub id like 'org/name', a folder that holds "
            f"a {_INDEX} or {INDEXES[1]}, or a language model's {LANGUAGE_CONFIG}, or a file "
            f"({' or '.join(SINGLE_FILES)})"
        )
    return text, {}


def is_single_file(source: str) -> bool:
    """Is what `find` gave one file of weights?"""
    return is_weights(source) and Path(source).is_file()


def is_weights(name: str) -> bool:
    """Is this the name of a file of weights, in any letter case?"""
    return name.lower().endswith(SINGLE_FILES)


def index_of(folder: Path) -> Path | None:
    """The index of the pipeline that a folder holds; None if it holds none."""
    return next((folder / name for name in INDEXES if (folder / name).is_file()), None)


def holds_language_model(folder: Path) -> bool:
    """Whether a folder is a plain language model of transformers, and no pipeline."""
    config = folder / LANGUAGE_CONFIG
    if index_of(folder) is not None or not config.is_file():
        return False
    try:
        classes = jsonfile.loads(jsonfile.read(config)).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in classes)


def class_in(entry: Any) -> tuple[str, str] | None:
    """Library and class of a component by its entry in an index.

    Entries of modular pipelines say where it is to be loaded from, too, and its class there.

    Returns:
        None for a plain value, and for a component that the model leaves out.
    """
    if not isinstance(entry, (list, tuple)):
        return None
    names = entry[2].get("type_hint") if len(entry) == 3 and isinstance(entry[2], dict) else entry
    if not isinstance(names, (list, tuple)) or len(names) != 2 or None in names:
        return None
    return str(names[0]), str(names[1])


def components_of(source: str) -> dict[str, str]:
    """The modules of a local pipeline: class names by component; {} where its index tells none."""
    folder = Path(source)
    try:
        index = jsonfile.loads(jsonfile.read(index_of(folder) or folder / _INDEX))
        classes = {name: class_in(entry) for name, entry in index.items()}
    except (OSError, ValueError, AttributeError):
        return {}
    is_module = {name: (folder / name / "config.json").is_file() for name in classes}
    return {name: entry[1] for name, entry in classes.items() if entry and is_module[name]}


def pipeline_of(model: str) -> str:
    """The pipeline class that the index of a local model names; "" where it cannot be read."""
    try:
        folder = Path(find(model)[0])
        index = jsonfile.loads(jsonfile.read(index_of(folder) or folder / _INDEX))
        return str(index["_class_name"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def check_hub(model: str, revision: str | None) -> Path:
    """Check that a hub model can be had: fetch its index, if it is not in the cache.

    Returns:
        Where its index is.

    Raises:
        LoadFailed: says which of these it is: no such model or revision, a gated one, no network,
            offline mode, or no diffusers pipeline.
    """
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache

    with hub_errors(model, revision, _INDEX):
        for name in (*INDEXES, LANGUAGE_CONFIG):
            if isinstance(at := try_to_load_from_cache(model, name, revision=revision), str):
                return Path(at)
        reach_hub()
        for name in (_INDEX, INDEXES[1], LANGUAGE_CONFIG):
            with suppress(errors.RemoteEntryNotFoundError):
                return Path(hf_hub_download(model, name, revision=revision, etag_timeout=5))
        return Path(hf_hub_download(model, _INDEX, revision=revision, etag_timeout=5))


def hub_has(model: str, file: str) -> bool:
    """Whether a repository of the hub has a file, by the cache if it is there.

    Raises:
        LoadFailed: the hub cannot be asked, or refuses.
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
    """Say what a hub refuses, and what to do about it.

    Args:
        file: of the model, that is asked for.

    Raises:
        LoadFailed: the hub refused, or cannot be reached.
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
            why = (
                f"{constants.ENDPOINT} cannot be reached ({_last_cause(error)}): check the network"
            )
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
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # of its HTTP client
        if isinstance(error, errors.HfHubHTTPError):
            raise LoadFailed(f"the hub does not give {model}{at}: {_last_cause(error)}") from error
        raise LoadFailed(
            f"the connection to the hub broke while {model}{at} was fetched "
            f"({_last_cause(error)}): try again, it goes on where it was"
        ) from error
    except (OSError, ValueError) as error:
        raise LoadFailed(f"the hub does not give {model}{at}: {_last_cause(error)}") from error


def reach_hub() -> None:
    """See that the hub can be reached; within `hub_errors`, and not in offline mode."""
    from huggingface_hub import constants

    if not constants.is_offline_mode():
        _connect(constants.ENDPOINT)  # the library tries for half a minute


class _Unreachable(Exception):
    """Nothing answers where the hub should be."""


def _connect(url: str) -> None:
    """See that the hub can be reached at all; a proxy is left to the library."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if getproxies().get(parts.scheme):
        return
    try:
        socket.create_connection((parts.hostname or "", port), timeout=3).close()
    except OSError as error:
        raise _Unreachable from error


def _last_cause(error: BaseException) -> str:
    """The first line of the exception that all the others came of."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _card(file: Path) -> dict[str, Any]:
    """The contents of a card file.

    Raises:
        LoadFailed: it is none.
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
