"""Rules for the parameters of every pipeline: steps, sigmas, strength, lengths, texts, the size."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from carpool.errors import InvalidValue
from carpool.request.card import Card, Task
from carpool.request.sizes import check_size
from carpool.request.values import is_int, is_number

MOST_TEXT = 32_000  # characters of one parameter, as in OpenAI's API
MOST_TEXTS = 2 * MOST_TEXT  # characters of a request
MOST_TOKENS = 4096  # padded length of a text, if the pipeline's default is not longer
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("num_frames", "decode_chunk_size"), (1, math.inf)),
    **dict.fromkeys(("strength", "control_guidance_start", "control_guidance_end"), (0, 1)),
    "denoising_start": (0.001, 0.999),  # diffusers ignores 0, 1 and what is beyond
    "denoising_end": (0.001, 1),
    "layers": (1, 16),  # layers of a decomposed picture, each as large as the picture
    "octree_resolution": (1, 512),  # for meshes: memory grows with its cube, to 3 GB at 512
    "num_chunks": (1, 200_000),  # points of a mesh that are decoded at once
}
TOKENS = (
    "max_sequence_length", "max_text_length", "max_lyric_length", "tokenizer_max_length",
    "max_new_tokens", "prompt_max_new_tokens", "gen_length",
)  # fmt: skip


def check_rules(card: Card, task: Task, arguments: Mapping[str, Any]) -> None:
    """Check steps, sigmas, strength, lengths and the size."""
    for name, value in arguments.items():
        if "num_inference_steps" in name and value is not None:  # also `prior_...`, `decoder_...`
            _check_steps(card, name, value)
    for name in ("sigmas", "timesteps"):  # one entry for each step
        entries = arguments.get(name)
        if isinstance(entries, (list, tuple)) and not 1 <= len(entries) <= card.max_steps:
            rule = f"must have from 1 to {card.max_steps} entries"
            raise InvalidValue(f"{name} has {len(entries)} entries: {rule}", param=name)
    for name in TOKENS:
        value, max_tokens = arguments.get(name), _most_tokens(card, name)
        if value is not None and not (is_int(value) and 1 <= value <= max_tokens):
            rule = f"at most {max_tokens}" if is_int(value) and value > max_tokens else "at least 1"
            raise InvalidValue.of(name, value, f"must be {rule}")
    for name, (low, high) in BOUNDS.items():
        value = arguments.get(name)
        if value is not None and is_number(value) and not low <= value <= high:
            rule = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise InvalidValue.of(name, value, f"must be {rule}")
    check_size(card, arguments, task)


def _check_steps(card: Card, name: str, value: Any) -> None:
    """Check the steps of one stage: a number, a list, or for Wuerstchen a dict."""
    rule = f"must be a whole number from 1 to {card.max_steps}"
    counts = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(counts, (list, tuple)):
        rule = f"must have whole numbers above 0, {card.max_steps} in all"
        if not all(is_int(count) and count >= 1 for count in counts):
            raise InvalidValue.of(name, value, rule)
        counts = sum(counts)
    if not (is_number(counts) and 1 <= counts <= card.max_steps):
        raise InvalidValue.of(name, value, rule)


def _most_tokens(card: Card, name: str) -> int:
    """Limit of a padded length: tokenizers pad to any length, until memory runs out."""
    defaults = (p.default for task in card.tasks for p in task.parameters if p.name == name)
    return max([MOST_TOKENS, *(length for length in defaults if isinstance(length, int))])


def check_strength(task: Task, arguments: Mapping[str, Any]) -> None:
    """Refuse a strength that leaves no steps, by diffusers' `get_timesteps`."""
    values = {p.name: p.default for p in task.parameters} | dict(arguments)
    strength, steps = values.get("strength"), values.get("num_inference_steps")
    for name in ("sigmas", "timesteps"):
        steps = len(values[name]) if isinstance(values.get(name), (list, tuple)) else steps
    if task.strength_rounds is None or not is_number(strength) or not steps:
        return
    if values.get("denoising_start") is not None:  # strength is ignored then
        return
    if "strength" not in arguments and values.get("image") is None:  # as in StyleAligned
        return
    is_rounded_up, share = task.strength_rounds == "up", steps * strength
    if int(max(steps - min(share, steps), 0)) < steps if is_rounded_up else int(share) >= 1:
        return
    example = f"{math.ceil(10_000 / steps) / 10_000:g}"  # rounded for the message
    rule = f"must be above 0, such as {example}" if is_rounded_up else f"must be at least {example}"
    raise InvalidValue.of("strength", strength, f"leaves none of {steps} steps, {rule}")


def check_texts(arguments: Mapping[str, Any]) -> None:
    """Limit all texts: a tokenizer reads a whole text before it truncates it."""
    sizes = {name: sum(map(len, _texts(value))) for name, value in arguments.items()}
    for name, size in sizes.items():
        if size > MOST_TEXT:
            rule = f"must have at most {MOST_TEXT}"
            raise InvalidValue(f"{name} has {size} characters: {rule}", param=name)
    if (size := sum(sizes.values())) > MOST_TEXTS:
        by_size = sorted(sizes, key=lambda name: -sizes[name])
        names = " and ".join(name for name in by_size if sizes[name])
        raise InvalidValue(
            f"{names} have {size} characters together: must have at most {MOST_TEXTS}",
            param=by_size[0],
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
