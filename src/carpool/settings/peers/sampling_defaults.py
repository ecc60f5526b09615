"""Default values of request parameters, from a server setting.

    {"num_inference_steps": 20, "guidance_scale": 4.0}

or vLLM-Omni's form, by the number of the stage: `{"0": {...}}`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from carpool import jsonfile
from carpool.errors import SettingRejected

_INSTEAD = {"seed": "requests without a seed get a new one"}


def sampling_defaults(text: str | None) -> dict[str, Any]:
    """Parse the setting `default_sampling_params`; returns values by name."""
    if text is None:
        return {}
    example = """such as '{"num_inference_steps": 20}'"""
    try:
        data = jsonfile.loads(text)
    except ValueError as error:
        rule = f"must be a JSON object, {example}"
        raise SettingRejected(f"default_sampling_params: {rule}: {error}") from error
    if isinstance(data, Mapping) and data and all(str(key).isdecimal() for key in data):
        if len(data) > 1:
            rule = "give those of the diffusion stage, Carpool runs no other"
            raise SettingRejected(f"default_sampling_params has {len(data)} stages: {rule}")
        data = next(iter(data.values()))
    if not isinstance(data, Mapping):
        raise SettingRejected(f"default_sampling_params={text:.60}: must be an object, {example}")
    return {name: value for name, value in data.items() if value is not None}


def split(defaults: Mapping[str, Any], takes: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The values that a model takes, by its parameters' names; a message for each other value."""
    accepted = {name: value for name, value in defaults.items() if name in takes}
    lines = [
        f"default_sampling_params: {name} is ignored: "
        f"{_INSTEAD.get(name, 'the model takes no such parameter')}"
        for name in defaults
        if name not in accepted
    ]
    return accepted, lines
