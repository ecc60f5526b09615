"""Settings in a file: `--config carpool.yaml`, its JSON schema, and `carpool config`.

A flag wins over the environment, the environment over the file, the file over the default.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from carpool.cli.options import settings_options
from carpool.config import ENV_PREFIX, ServeSettings
from carpool.errors import SettingRejected, nearest
from carpool.settings.rules import FINITE, base_type, meta_of

SECRETS = ("api_key", "webhook_secret")
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings of a file, with `model` or `models` if present. Lists become tuples, and
    numbers get the setting's type; `carpool.fleet.models` checks the entries of `models`.

    Raises:
        SettingRejected: the file cannot be read, or has other content.
    """
    from carpool.settings.yaml_file import read_yaml  # slow import of yaml

    content = read_yaml(path, f"config={str(path)!r}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingRejected(f"config={str(path)!r}: must be NAME: VALUE lines, as max_queue: 100")
    hints: dict[str, Any] = {"model": str, "models": list, **get_type_hints(ServeSettings)}
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            close = nearest(name, list(hints))
            raise SettingRejected(f"config={str(path)!r}: unknown setting {str(key)!r}{close}")
        if name in settings:
            raise SettingRejected(f"config={str(path)!r}: {name} is there twice")
        settings[name] = value if name == "models" else _value(value, hints[name])
    if not isinstance(settings.get("model", ""), str):
        raise SettingRejected(f"config={str(path)!r}: model must be text")
    return {name: value for name, value in settings.items() if value is not None}


def _value(value: Any, hint: Any) -> Any:
    """Convert a value to the setting's type; the setting's check refuses invalid values."""
    if get_origin(hint) is tuple:
        return tuple(value) if isinstance(value, list) else (value,)
    if base_type(hint) is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def schema() -> dict[str, Any]:
    """The JSON schema of a file of settings."""
    hints = get_type_hints(ServeSettings, include_extras=True)
    properties: dict[str, Any] = {
        "model": {"type": "string", "description": "see the argument of `carpool serve`"},
        "models": {
            "type": "array",
            "items": {"type": ["string", "object"]},
            "description": "several models: each with model, name, workers, devices, load, "
            "keep_alive and settings of its own",
        },
    }
    for field in dataclasses.fields(ServeSettings):
        hint = hints[field.name]
        bounds = meta_of(hint)
        entry: dict[str, Any] = {"type": _TYPES[base_type(hint)]}
        if get_origin(hint) is Literal:
            entry = {"enum": list(get_args(hint))}
        if get_origin(hint) is tuple:
            entry = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
        if bounds.ge is not None:
            entry["minimum"] = bounds.ge
        if bounds.le not in (None, FINITE):
            entry["maximum"] = bounds.le
        if field.default not in (None, ()):
            entry["default"] = field.default
        properties[field.name] = entry | {"description": field.metadata["help"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of carpool serve",
        "type": "object",
        "properties": properties,
        "patternProperties": {"-": {}},  # max-queue means max_queue
        "additionalProperties": False,
    }


def sources(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> tuple[ServeSettings, dict[str, str]]:
    """The effective settings, and the source of each."""
    explicit = {name: value for name, value in flags.items() if value not in (None, ())}
    of_file = read_config(file) if file is not None else {}
    names = {key.removeprefix(ENV_PREFIX).lower() for key in environ if key.startswith(ENV_PREFIX)}
    above = {*names, "model", "models"}
    remainder = {name: value for name, value in of_file.items() if name not in above}
    settings = ServeSettings.from_environment(environ, **{**remainder, **explicit})
    origins = {}
    for field in dataclasses.fields(ServeSettings):
        name = field.name
        origins[name] = (
            f"--{name.replace('_', '-')}" if name in explicit
            else f"{ENV_PREFIX}{name.upper()}" if name in names
            else str(file) if name in remainder
            else "default" if getattr(settings, name) == field.default
            else "another setting"
        )  # fmt: skip
    return settings, origins


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="a file of settings")
@click.option("--show", is_flag=True, help="print the effective settings and their sources")
@click.option("--schema", "as_schema", is_flag=True, help="print the JSON schema of the file")
@settings_options(ServeSettings, hidden=True)
def config(file: Path | None, show: bool, as_schema: bool, **flags: Any) -> None:
    """Show the settings of `carpool serve` for the same flags and variables."""
    if as_schema:
        click.echo(json.dumps(schema(), indent=2))
        return
    settings, origins = sources(flags, os.environ, file)
    for field in dataclasses.fields(ServeSettings):
        value, source = getattr(settings, field.name), origins[field.name]
        if source == "default" and not show:
            continue
        text = "(hidden)" if field.name in SECRETS and value else json.dumps(value)  # also YAML
        click.echo(f"{field.name + ':':28} {text:24} # {source}")
