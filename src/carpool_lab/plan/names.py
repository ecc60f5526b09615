"""Check the arguments of a plan by name: models, devices, sizes, kinds."""

import json
from pathlib import Path
from typing import Any

from carpool.errors import CarpoolError, InvalidValue, LoadFailed, SettingRejected, nearest
from carpool.models.source import INDEXES, find, index_of, is_single_file
from carpool.settings.preparation import sizes
from carpool.settings.quantization import quantizations

MODELS = Path(__file__).with_name("models.json")
COUNTED = Path(__file__).with_name("counted.json")
"""Models of other packages, with what these packages' own code was counted to take."""


def known() -> dict[str, Any]:
    """The planner's real-size models, by name."""
    models: dict[str, Any] = json.loads(MODELS.read_text()) | json.loads(COUNTED.read_text())
    for name, data in models.items():
        if (parent := models.get(data.get("like"))) is not None:  # overridden by these entries
            components = {**parent["components"], **data["components"]}
            models[name] = {**parent, **data, "components": components}
    return models


def named(model: str) -> str:
    """The planner's name of a model, if its hub id is known."""
    ids = {data["model_id"]: short for short, data in known().items()}
    return str(ids.get(model, model))


def check(model: str, sizes: list[str], quantize: str | None) -> None:
    """Check the arguments of a plan that do not need the model's configs.

    Args:
        sizes: sizes as text.

    Raises:
        CarpoolError: the model, a size or a kind of quantized weights is invalid.
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
    """Parse a size in pixels.

    Raises:
        InvalidValue: not a size.
    """
    try:
        [pair] = sizes(size)
    except (SettingRejected, ValueError) as error:
        raise InvalidValue(f"size {size!r}: write WIDTHxHEIGHT, as 1024x1024") from error
    return pair


def no_configs(model: str, error: Exception) -> LoadFailed:
    """The error for a model without local configs."""
    alternatives = f"{nearest(model, known())}: there are {', '.join(known())}"
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
