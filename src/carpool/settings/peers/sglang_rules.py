"""Caps from a batching-config file in SGLang-Diffusion's format.

Rules only tighten: every rule that matches applies, and the smallest cap wins.

    {"schema_version": 1, "rules": [
        {"model_contains": "Qwen-Image", "resolution": "1024x1024", "max_batch_size": 2}]}

A bare list of rules is accepted too, and a mapping `{"MODEL|WIDTHxHEIGHT": {...a rule...}}`.

It accepts all files that SGLang-Diffusion accepts, with numbers as text ("4"), and also `comment`
in a rule or next to `rules`. Exceptions, which SGLang-Diffusion accepts but this refuses: NaN and
infinity, which would disable a cap; fractional batch sizes (4.7); duplicate keys in an object,
where one value would be lost.

Source: SGLang-Diffusion 0.5.23, batching config of schema version 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from carpool import jsonfile
from carpool.errors import SettingRejected, nearest
from carpool.settings.rules import Count, Switch, Text, check_entry

Resolution = tuple[int, int]
"""Width and height, pixels."""

_PATTERN = r"^([1-9][0-9]*x[1-9][0-9]*|\*)$"
_Size = Annotated[str, Meta(pattern=_PATTERN, description="WIDTHxHEIGHT, such as 1024x768, or *")]
_Cost = Annotated[float, Meta(gt=0, lt=1e300, description="a number above 0")]
_GiB = Annotated[float, Meta(ge=0, lt=1e300, description="a number of GiB of at least 0")]
_NUMBERS = ("max_batch_size", "max_cost", "device_memory_gb_min", "device_memory_gb_max")
COMMENTS = ("comment", "comments")  # for human readers, as is calibration
_SWITCHES = dict.fromkeys(("1", "true", "yes", "y", "on"), True)
_SWITCHES |= dict.fromkeys(("0", "false", "no", "n", "off"), False)


class BatchingRule(msgspec.Struct, frozen=True, kw_only=True):
    """One cap, and its conditions on servers and requests; None matches any."""

    max_batch_size: Count  # outputs
    max_cost: _Cost | None = None  # sum over the batch, see `admission.cost`
    model: Text | None = None  # name of the server's model at its start
    model_contains: Text | None = None  # part of that name, case-sensitive
    resolution: Resolution | None = None  # size of the batch's head
    device_memory_gb_min: _GiB | None = None  # total GiB, inclusive
    device_memory_gb_max: _GiB | None = None  # total GiB, inclusive
    offload: Switch | None = None  # weights are kept off the device

    def matches(self, server: "Server", resolution: Resolution | None) -> bool:
        """Return whether the rule applies to this server and a head of this size.

        If the device memory is unknown, bounds on it are ignored.
        """
        gib = server.device_memory_gib
        low, high = self.device_memory_gb_min, self.device_memory_gb_max
        return (
            self.model in (None, server.model)
            and (self.model_contains or "") in server.model
            and self.resolution in (None, resolution)
            and (gib is None or low is None or low <= gib)
            and (gib is None or high is None or gib <= high)
            and self.offload in (None, server.is_offloaded)
        )


_KINDS = get_type_hints(BatchingRule, include_extras=True) | {"resolution": _Size}


@dataclass(frozen=True, slots=True)
class Server:
    """Properties of the server that rules test."""

    model: str
    device_memory_gib: float | None  # None: unknown
    is_offloaded: bool


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of a batch. A single request may exceed them."""

    outputs: int
    cost: float | None = None  # None: no rule sets it


def caps(
    rules: Sequence[BatchingRule], server: Server, resolution: Resolution | None, user_max: int
) -> Caps:
    """The smallest caps of all matching rules.

    Args:
        rules: result of `load_rules`, in any order.
        server: this server.
        resolution: size of the batch's head; None: only rules for any size match.
        user_max: `--batching-max-size`, outputs. No rule can raise it.
    """
    matching = [rule for rule in rules if rule.matches(server, resolution)]
    costs = [rule.max_cost for rule in matching if rule.max_cost is not None]
    return Caps(
        outputs=min([user_max, *(rule.max_batch_size for rule in matching)]),
        cost=min(costs, default=None),
    )


def load_rules(path: Path) -> tuple[BatchingRule, ...]:
    """Read a batching config.

    Raises:
        SettingRejected: the file is unreadable or invalid; the message names the key, and for an
            unknown key the nearest valid one.
    """
    source = f"batching config {path}"
    try:
        data = jsonfile.loads(jsonfile.read(path), object_pairs_hook=_without_twins)
    except (OSError, ValueError) as error:
        raise SettingRejected(f"{source} cannot be read: {error}") from error
    return parse_rules(data, source)


def parse_rules(data: Any, source: str) -> tuple[BatchingRule, ...]:
    """Parse rules from decoded JSON, in one of three forms; messages begin with `source`."""
    if isinstance(data, list):
        data = {"rules": data}
    if not isinstance(data, dict):
        raise SettingRejected(
            f"{source} is {_type_name(data)}: must be {{'schema_version': 1, 'rules': [...]}}, a "
            "list of rules, or a mapping from 'MODEL|WIDTHxHEIGHT' to rules"
        )
    version = data.get("schema_version")
    if version is not None and (isinstance(version, bool) or version != 1):
        raise _wrong(source, "schema_version", f"{version!r}: must be 1")
    entries = _listed(data, source) if "rules" in data else _keyed(data, source)
    if not entries:
        raise SettingRejected(f"{source} has no rules: leave it out, or write one")
    return tuple(_rule(entry, where) for where, entry in entries)


def _listed(data: dict[str, Any], source: str) -> list[tuple[str, Any]]:
    keys = ("schema_version", "rules", *COMMENTS)
    for key in data:
        if key not in keys:
            raise _wrong(source, key, f"is not a key of a batching config{nearest(key, keys)}")
    if not isinstance(data["rules"], list):
        raise _wrong(source, "rules", f"is {_type_name(data['rules'])}: must be a list of rules")
    return [(f"{source}: rule {i}", rule) for i, rule in enumerate(data["rules"], start=1)]


def _keyed(data: dict[str, Any], source: str) -> list[tuple[str, Any]]:
    entries: list[tuple[str, Any]] = []
    for key, entry in data.items():
        if key == "schema_version" or (key in COMMENTS and not isinstance(entry, dict)):
            continue
        if not isinstance(entry, dict):
            hint = nearest(key, ("schema_version", "rules"))
            raise _wrong(source, key, f"is {_type_name(entry)}: must be an object, a rule{hint}")
        model, _, size = key.partition("|")
        filled = {name: value for name, value in (("model", model), ("resolution", size)) if value}
        entries.append((f"{source}: rule {key!r}", filled | entry))
    return entries


def _rule(entry: Any, where: str) -> BatchingRule:
    keys = [*_KINDS, "calibration", *COMMENTS]
    if not isinstance(entry, dict):
        raise SettingRejected(f"{where} is {_type_name(entry)}: must be an object")
    for key in entry:
        if key not in keys:
            raise _wrong(where, key, f"is not a key of a rule{nearest(key, keys)}")
    fields = {key: value for key, value in entry.items() if key in _KINDS and value is not None}
    if "max_batch_size" not in fields:
        raise _wrong(where, "max_batch_size", "is missing: every rule needs one")
    if "model" not in fields and "model_contains" not in fields:
        raise _wrong(where, "model", "is missing: a rule needs it or model_contains")
    if "model" in fields and "model_contains" in fields:
        raise _wrong(where, "model_contains", "beside model: a rule takes one of them")
    checked = {key: _value(key, value, where) for key, value in fields.items()}
    low, high = checked.get("device_memory_gb_min"), checked.get("device_memory_gb_max")
    if low is not None and high is not None and low > high:
        rule = f"{low:g}: must be at most device_memory_gb_max, {high:g}"
        raise _wrong(where, "device_memory_gb_min", rule)
    return BatchingRule(**checked)


def _value(key: str, value: Any, where: str) -> Any:
    if key == "offload":
        value = _SWITCHES.get(str(value).strip().lower(), value)
    elif isinstance(value, str) and key in _NUMBERS:
        value = _number(value)
    check_entry(where, key, value, _KINDS[key])
    if key == "resolution":
        return None if value == "*" else tuple(map(int, value.split("x")))
    return value


def _number(text: str) -> int | float | str:
    """Convert a text to a number; returns the text itself if it is not a number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _wrong(where: str, key: str, problem: str) -> SettingRejected:
    return SettingRejected(f"{where}: {key} {problem}", param=key)


def _type_name(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"{key!r} stands twice in one object")
        mapping[key] = value
    return mapping
