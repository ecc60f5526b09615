"""The newest models: `newest.json` has the recipe of each part."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.tiny.parts import part

DATA: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def components(family: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {name: part(recipe) for name, recipe in DATA[family].items() if name not in without}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {name: partial(components, name) for name in DATA}
_READERS = {"qwen_processor", "qwen3_processor", "siglip_processor"}
NEEDS_TORCHVISION = {
    name for name, recipe in DATA.items() if _READERS & {*recipe, *map(str, recipe.values())}
}
