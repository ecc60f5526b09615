"""Translate fields that clients of SGLang and vLLM-Omni send to ours.

Those that mean the same under another name are renamed, those that change nothing here are left
out, and those that would change the picture are refused by name. A field that the model's own
pipeline takes is always handed on to it.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from carpool.errors import InvalidValue, UnsupportedParameter, show
from carpool.request.card import Card
from carpool.server.bodies.json_bodies import in_text

NESTED = ("extra_body", "diffusers_kwargs", "extra_params", "extra_args")
"""Objects whose fields count as if they stood at top level."""

NEUTRAL = frozenset({"bot_task", "save_output", "output_quality"})
"""Fields about how a server works or reports, or (bot_task) about a language model in front."""

_SWITCHES = """enable_teacache enable_cache_dit enable_spectrum enable_upscaling
enable_frame_interpolation return_trajectory_latents return_trajectory_decoded"""
SWITCHES = frozenset(_SWITCHES.split())
"""Ways of those servers to draw something else; a client may send them switched off."""

_OFF = (None, False, "false", "False", 0, "0", "")


def translated(values: Mapping[str, Any], card: Card) -> dict[str, Any]:
    """Rename the fields of a body to the names that they have here.

    Raises:
        InvalidValue: a field is given twice with different values, or is no object.
        UnsupportedParameter: a field would change the picture in a way that is not known here.
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
    """A seed, or a list of several, which a form writes as JSON."""
    seed = _parsed(seed) if isinstance(seed, str) and seed.startswith("[") else seed
    return seed[0] if isinstance(seed, list) and len(seed) == 1 else seed


def _merge(fields: dict[str, Any], extra: Mapping[str, Any], source: str) -> None:
    for name, value in extra.items():
        if name in NESTED:
            raise InvalidValue(f"{source} has another {name} in it: say it once", param=source)
        if fields.get(name) is not None and fields[name] != value:
            value_pair = f"{show(fields[name])}, and {show(value)} in {source}"
            raise InvalidValue(f"{name} is {value_pair}: say it once", param=name[:60])
        fields[name] = value


def _object(value: Any, name: str) -> dict[str, Any]:
    """An object, which a form writes as JSON."""
    value = _parsed(value) if isinstance(value, str) else value
    if value is not None and not isinstance(value, dict):
        raise InvalidValue.of(name, value, "must be an object of fields")
    return value or {}


def _parsed(text: str) -> Any:
    """The JSON in a text, or the text itself if it is none."""
    with suppress(ValueError, RecursionError):
        return in_text(text)
    return text


def _count(value: Any) -> Any:
    """A number of pictures, which a form writes as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() and value.isascii() else value
