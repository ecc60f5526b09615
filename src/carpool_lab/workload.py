"""Workloads: arrival times, mixes of settings, traces. Pure functions of a seed.

Times are seconds after the start of a run. Requests are plain dicts, the bodies of HTTP requests:
`prompt`, `seed`, and other fields (`size`, `num_inference_steps`, ...). This module neither sends
requests nor reads a clock, so the simulator and the load client share workloads.

Arrival times and requests come from different generators: with another rate, the same seed makes
the same requests in the same order.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from carpool import jsonfile
from carpool.errors import InvalidValue

PROMPTS = tuple(
    """
a red circle on a blue background
a yellow star left of a green square on a black background
a white ring on a purple background
a lighthouse at dusk, long exposure
a bowl of ramen, studio light
a watercolour of a fox in the snow
an astronaut reading in a library
the old harbour in the rain
a paper boat on a puddle, macro photograph
a city made of books, isometric
a portrait of a beekeeper, oil on canvas
two cats asleep on a windowsill
a tram in fog, black and white
a glass greenhouse full of ferns
a mountain lake under the milky way
a bicycle against a yellow wall
an otter juggling pebbles, children's book
a cup of coffee seen from above
a sailing ship in a bottle
a market street at night, neon signs
""".strip().splitlines()
)
"""The default prompts."""

WORDS = frozenset({"prompt", "seed", "user", "priority"})
"""Fields of a request that do not change its cost."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and its arrival time."""

    at_s: float  # seconds after the start of the run
    body: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of a mix."""

    body: Mapping[str, Any] = field(default_factory=dict, hash=False)  # without prompt and seed
    prompts: Sequence[str] = PROMPTS
    weight: float = 1.0  # relative frequency


@dataclass(frozen=True, slots=True)
class Mix:
    """Settings to choose from."""

    settings: Sequence[Setting]

    def choose(self, rng: random.Random) -> dict[str, Any]:
        """Draw a request: a setting by weight, one of its prompts, a 32-bit seed."""
        weights = [setting.weight for setting in self.settings]
        [setting] = rng.choices(self.settings, weights)
        seed = rng.getrandbits(32)
        return {"prompt": rng.choice(setting.prompts), "seed": seed, **setting.body}


def generators(seed: int) -> tuple[random.Random, random.Random]:
    """The generators of a run: for arrivals, and for requests."""
    return random.Random(f"arrivals {seed}"), random.Random(f"requests {seed}")


def bursts(rate_per_s: float, rng: random.Random, *, size: int) -> Iterator[float]:
    """An endless Poisson process of groups of `size` arrivals; at an infinite rate all at once.

    Args:
        rate_per_s: rate of requests, not of groups.

    Raises:
        InvalidValue: the rate is not above 0, or the size is below 1.
    """
    if not rate_per_s > 0 or size < 1:
        raise InvalidValue(f"rate {rate_per_s:g}/s in bursts of {size}: both must be above 0")
    return _bursts(rate_per_s / size, rng, size)


def _bursts(groups_per_s: float, rng: random.Random, size: int) -> Iterator[float]:
    now_s = 0.0
    while True:
        now_s += rng.expovariate(groups_per_s)
        for _ in range(size):
            yield now_s


def plan(times_s: Iterator[float], mix: Mix, rng: random.Random, *, count: int) -> list[Arrival]:
    """The first `count` arrivals, each with a request of the mix."""
    return [Arrival(next(times_s), mix.choose(rng)) for _ in range(count)]


def read_mix(text: str, defaults: Mapping[str, Any]) -> Mix:
    """Read a mix from JSON lines or a JSON list.

    An entry may have `weight` (default 1) and `prompt` or `prompts` (default: a built-in list);
    other fields go into the request and override `defaults`.

    Raises:
        InvalidValue: the message has the problem and the entry.
    """
    settings = [_setting(number, entry, defaults) for number, entry in _entries(text)]
    if not any(setting.weight for setting in settings):
        raise InvalidValue("the mix has no entry with a weight above 0")
    return Mix(settings)


def read_trace(text: str, mix: Mix, rng: random.Random) -> list[Arrival]:
    """Read arrivals from JSON lines or a JSON list; missing fields come from the mix.

    Every entry has `at_s`, seconds after the start; entries may be in any order.

    Raises:
        InvalidValue: the message has the problem and the entry.
    """
    arrivals = []
    for number, entry in _entries(text):
        at_s = entry.pop("at_s", None)
        if not _is_number(at_s):
            raise InvalidValue(f"entry {number}: at_s={at_s!r} must be seconds, 0 or more")
        arrivals.append(Arrival(at_s, {**mix.choose(rng), **entry}))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


@contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Add the file's name to errors about a mix or trace."""
    try:
        yield
    except InvalidValue as error:
        raise InvalidValue(f"{path}: {error}") from None


def kind_of(body: Mapping[str, Any]) -> str:
    """A key of all fields that affect the cost of a step: all but steps and texts.

    It includes whether there is a negative prompt, but not its text.
    """
    ignored = WORDS | {"num_inference_steps", "negative_prompt"}
    kind = {name: value for name, value in body.items() if name not in ignored}
    return json.dumps(kind | {"negative": bool(body.get("negative_prompt"))}, sort_keys=True)


def _entries(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file, numbered from 1."""
    try:
        if text.lstrip().startswith("["):
            entries = jsonfile.loads(text)
        else:
            entries = [jsonfile.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise InvalidValue(f"neither JSON lines nor a JSON list: {error}") from None
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise InvalidValue(f"entry {number}: must be a JSON object, not {repr(entry)[:40]}")
        steps = entry.get("num_inference_steps", 1)
        if type(steps) is not int or steps < 1:
            rule = f"num_inference_steps={steps!r}: a whole number, 1 or more"
            raise InvalidValue(f"entry {number}: {rule}")
        yield number, entry


def _setting(number: int, entry: dict[str, Any], defaults: Mapping[str, Any]) -> Setting:
    weight = entry.pop("weight", 1.0)
    if not _is_number(weight):
        raise InvalidValue(f"entry {number}: weight={weight!r} must be a number, 0 or more")
    if {"prompt", "prompts"} <= entry.keys():
        raise InvalidValue(f"entry {number}: give prompt or prompts, not both")
    prompts = entry.pop("prompts", [entry.pop("prompt")] if "prompt" in entry else PROMPTS)
    if (
        not isinstance(prompts, (list, tuple))
        or not prompts
        or not all(isinstance(p, str) for p in prompts)
    ):
        raise InvalidValue(f"entry {number}: prompts must be a list of texts, not empty")
    return Setting({**defaults, **entry}, prompts, weight)


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number, 0 or more: Python's JSON allows NaN."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 <= value < inf
