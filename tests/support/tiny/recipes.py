"""Recipes of tiny pipelines and their parts, as `families.json` and `parts.json` have them.

A recipe is a name, or a list of a name, a config and gains. The name is a builder of `builders`,
another recipe of `parts.json`, whose config the list's own amends, or a class of diffusers or
transformers (`module:Class` where neither exports it). Any other value is a setting of the
pipeline. Nothing here imports torch.
"""

import json
from pathlib import Path
from typing import Any

PARTS: dict[str, list[Any]] = json.loads(Path(__file__).with_name("parts.json").read_text())
FAMILIES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("families.json").read_text()
)


def recipes_of(family: str) -> dict[str, Any]:
    """The recipes of a family's parts, its base's among them; none of an unknown family."""
    entry = FAMILIES.get(family, {"parts": {}})
    inherited = recipes_of(entry["base"]) if "base" in entry else {}
    return {**inherited, **entry["parts"]}


def resolved(recipe: str | list[Any]) -> tuple[str, dict[str, Any], dict[str, float]]:
    """The class or builder of a part, its whole config, and its gains."""
    name, config, gains = [*([recipe] if isinstance(recipe, str) else recipe), {}, {}][:3]
    if name not in PARTS:
        return name, config, gains
    name, shared, gains = resolved(PARTS[name])
    return name, {**shared, **config}, gains
