"""What a plan is asked for, checked by name: models, devices, sizes, kinds."""

import json
from pathlib import Path
from typing import Any

from carpool.errors import CarpoolError, InvalidValue, LoadFailed, SettingRejected, nearest
from carpool.models.source import INDEXES, find, index_of, is_single_file
from carpool.settings.preparation import sizes
from carpool.settings.quantization import quantizations

MODELS = Path(__file__).with_name("models.json")


def known() -> dict[str, Any]:
    """The real-size models that come with the planner, by name."""
    models: dict[str, Any] = json.loads(MODELS.read_text())
    for name, data in models.items():
        if (parent := models.get(data.get("like"))) is not None:  # but for these entries
            components = {**parent["components"], **data["components"]}
            models[name] = {**parent, **data, "components": components}
    return models


def named(model: str) -> str:
    """The planner's name of a model, where it is known by its hub id."""
    ids = {data["model_id"]: short for short, data in known().items()}
    return str(ids.get(model, model))


def check(model: str, sizes: list[str], quantize: str | None) -> None:
    """Check what a plan is asked for, but what only the model's configs tell.

    Args:
        sizes: sizes, as people write them.

    Raises:
        CarpoolError: the model, a size or a kind of quantized weights is none.
    """
    for size in sizes:
        check_size(size)
    quantizations(quantize)
    if named(model) in known() or is_single_file(model):
        return
    try:
        source, card = find(model)
        if not card and not _is_cached(source):
            raise LoadFailed("the cache of the hub does not have it: `carpool pull` fetches it")
    except CarpoolError as error:
        raise no_configs(model, error) from error


def check_size(size: str) -> tuple[int, int]:
    """A size in pixels.

    Raises:
        InvalidValue: it is none.
    """
    try:
        [pair] = sizes(size)
    except (SettingRejected, ValueError) as error:
        raise InvalidValue(f"size {size!r}: write WIDTHxHEIGHT, as 1024x1024") from error
    return pair


def no_configs(model: str, error: Exception) -> LoadFailed:
    """The error for a model whose configs are not here."""
    models = known()
    alternatives = f"{nearest(model, models)}: there are {', '.join(models)}"
    return LoadFailed(f"no configs of {model!r} here ({error}){alternatives}")


def _is_cached(source: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if index_of(Path(source)) is not None:
        return True
    try:
        return any(isinstance(try_to_load_from_cache(source, name), str) for name in INDEXES)
    except HFValidationError as error:
        raise LoadFailed(str(error)) from error
