"""Rules for the parameters of every pipeline: steps, sigmas, strength, lengths, texts, the size."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from carpool.errors import InvalidValue
from carpool.request.card import Card, Task
from carpool.request.sizes import check_size
from carpool.request.values import is_number

MOST_TEXT = 32_000  # characters of one parameter, as OpenAI has it
MOST_TEXTS = 2 * MOST_TEXT  # of a request


def check_rules(card: Card, arguments: Mapping[str, Any]) -> None:
    """Check steps, sigmas, strength, lengths and the size."""
    steps = arguments.get("num_inference_steps")
    if steps is not None and not 1 <= steps <= card.max_steps:
        raise InvalidValue.of(
            "num_inference_steps", steps, f"must be a whole number from 1 to {card.max_steps}"
        )
    for name in ("sigmas", "timesteps"):  # one entry a step
        given = arguments.get(name)
        if isinstance(given, (list, tuple)) and not 1 <= len(given) <= card.max_steps:
            rule = f"must have from 1 to {card.max_steps} entries"
            raise InvalidValue(f"{name} has {len(given)} entries: {rule}", param=name)
    strength = arguments.get("strength")
    if strength is not None and is_number(strength) and not 0 <= strength <= 1:
        raise InvalidValue.of("strength", strength, "must be from 0 to 1")
    for name in ("max_sequence_length", "num_frames"):
        value = arguments.get(name)
        if value is not None and value < 1:
            raise InvalidValue.of(name, value, "must be at least 1")
    check_size(card, arguments)


def check_strength(task: Task, arguments: Mapping[str, Any]) -> None:
    """Refuse a strength that leaves nothing to do, counted as diffusers' `get_timesteps` does."""
    said = {p.name: p.default for p in task.parameters} | dict(arguments)
    strength, steps = said.get("strength"), said.get("num_inference_steps")
    for name in ("sigmas", "timesteps"):
        steps = len(said[name]) if isinstance(said.get(name), (list, tuple)) else steps
    if task.strength_rounds is None or not is_number(strength) or not steps:
        return
    if said.get("denoising_start") is not None:  # then the strength is not read
        return
    is_rounded_up = task.strength_rounds == "up"
    if is_rounded_up and int(max(steps - min(steps * strength, steps), 0)) < steps:
        return
    if not is_rounded_up and int(steps * strength) >= 1:
        return
    least = f"{math.ceil(10_000 / steps) / 10_000:g}"  # in digits that can be read
    rule = f"must be above 0, such as {least}" if is_rounded_up else f"must be at least {least}"
    raise InvalidValue.of("strength", strength, f"leaves none of {steps} steps, {rule}")


def check_texts(arguments: Mapping[str, Any]) -> None:
    """Bound all texts: a tokenizer reads the whole of one before it cuts it to what fits."""
    sizes = {name: sum(map(len, _texts(value))) for name, value in arguments.items()}
    for name, size in sizes.items():
        if size > MOST_TEXT:
            rule = f"must have at most {MOST_TEXT}"
            raise InvalidValue(f"{name} has {size} characters: {rule}", param=name)
    if (size := sum(sizes.values())) > MOST_TEXTS:
        longest = sorted(sizes, key=lambda name: -sizes[name])
        said = " and ".join(name for name in longest if sizes[name])
        raise InvalidValue(
            f"{said} have {size} characters together: must have at most {MOST_TEXTS}",
            param=longest[0],
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
