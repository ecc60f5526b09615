"""Translate fields of SGLang's and vLLM-Omni's clients to fields of this API.

Synonyms are renamed, fields without effect here are dropped, and unsupported fields that would
change the picture are refused by name. A field that the model's own pipeline takes is always
passed to it.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from carpool.errors import InvalidValue, UnsupportedParameter, show
from carpool.request.card import Card
from carpool.server.bodies.json_bodies import in_text

NESTED = ("extra_body", "diffusers_kwargs", "extra_params", "extra_args")
"""Objects whose fields are merged into the top level."""

NEUTRAL = frozenset({"bot_task", "save_output", "output_quality"})
"""Fields about the server's operation or reports, or (bot_task) a separate language model."""

_SWITCHES = """enable_teacache enable_cache_dit enable_spectrum enable_upscaling
enable_frame_interpolation return_trajectory_latents return_trajectory_decoded"""
SWITCHES = frozenset(_SWITCHES.split())
"""Features of those servers that change the result; clients may send them disabled."""

_OFF = (None, False, "false", "False", 0, "0", "")


def translated(values: Mapping[str, Any], card: Card) -> dict[str, Any]:
    """Rename the fields of a body to this API's names.

    Raises:
        InvalidValue: a field has two different values, or is not an object.
        UnsupportedParameter: an unsupported field would change the picture.
    """
    fields = dict(values)
    names = {parameter.name for task in card.tasks for parameter in task.parameters}
    for name in NESTED:
        if name in fields and name not in names:
            _merge(fields, _object(fields.pop(name), name), name)
    if (count := "num_outputs_per_prompt") in fields and count not in names:
        _merge(fields, {"n": _count(fields.pop(count))}, count)
    if "seed" in fields:
        fields["seed"] = _seed(fields["seed"])
    for name in NEUTRAL - names:
        fields.pop(name, None)
    for name in SWITCHES - names & fields.keys():
        if (value := fields.pop(name, None)) not in _OFF:
            rule = "is not supported, and would change the picture: leave it out"
            raise UnsupportedParameter(f"{name}={show(value)} {rule}", param=name)
    device = fields.get("generator_device")
    if "generator_device" not in names and device is not None:
        if fields.get("seed") is not None and device != "cpu":
            rule = "noise is drawn on the CPU here, the same for every device: send cpu"
            raise UnsupportedParameter.of("generator_device", device, f"{rule}, or no seed")
        del fields["generator_device"]
    return fields


def _seed(seed: Any) -> Any:
    """Parse a seed, or a list of seeds; forms send lists as JSON."""
    seed = _parsed(seed) if isinstance(seed, str) and seed.startswith("[") else seed
    return seed[0] if isinstance(seed, list) and len(seed) == 1 else seed


def _merge(fields: dict[str, Any], extra: Mapping[str, Any], source: str) -> None:
    for name, value in extra.items():
        if name in NESTED:
            raise InvalidValue(f"{source} has another {name} in it: send it once", param=source)
        if fields.get(name) is not None and fields[name] != value:
            value_pair = f"{show(fields[name])}, and {show(value)} in {source}"
            raise InvalidValue(f"{name} is {value_pair}: send it once", param=name[:60])
        fields[name] = value


def _object(value: Any, name: str) -> dict[str, Any]:
    """Parse an object; forms send it as JSON."""
    value = _parsed(value) if isinstance(value, str) else value
    if value is not None and not isinstance(value, dict):
        raise InvalidValue.of(name, value, "must be an object of fields")
    return value or {}


def _parsed(text: str) -> Any:
    """Parse a text as JSON; returns the text itself if it is not JSON."""
    with suppress(ValueError, RecursionError):
        return in_text(text)
    return text


def _count(value: Any) -> Any:
    """Parse a number of pictures; forms send it as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() and value.isascii() else value
