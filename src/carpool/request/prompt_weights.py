"""`prompt_weights`: weights of words in a prompt, in the notation of AUTOMATIC1111's web UI.

`(word:1.3)` has weight 1.3, `(word)` 1.1, `[word]` 1 / 1.1; nested brackets multiply. A backslash
escapes a bracket. Source: `parse_prompt_attention` of AUTOMATIC1111 1.10.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from carpool.errors import InvalidValue, UnsupportedParameter, show
from carpool.request.card import Card, Task

NAME = "prompt_weights"
PROMPTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")

WeightsReader = Literal["", "missing", "compel"]
"""Reader of a model's weights: none, compel but not installed, or compel."""

_FACTOR = 1.1  # weight of a pair of brackets without a number
_TOKEN = re.compile(r"\\.?|[(\[]|:\s*([+-]?\d*\.?\d+)\s*\)|[)\]]|[^\\()\[\]:]+|:", re.DOTALL)
_ESCAPE = re.compile(r"\\([()\[\]\\]?)")
_WEIGHTS = re.compile(r"\([^()]{1,200}:\s*[+-]?\d*\.?\d+\s*\)|\(\([^()]{1,200}\)\)")
_EDITING = re.compile(r"\[[^\[\]]{0,200}[:|][^\[\]]{0,200}\]|\b(?:BREAK|AND)\b")
_BRACKETS = re.compile(r"\[[^\[\]]{1,200}\]")


def fragments(prompt: str) -> list[tuple[str, float]]:
    """Split a prompt into texts with weights; InvalidValue for a weight below 0."""
    parts, opened = list[tuple[str, float]](), list[tuple[str, int]]()

    def close(bracket: str, factor: float) -> bool:
        place = next((at for at in reversed(range(len(opened))) if opened[at][0] == bracket), None)
        if place is not None:
            _, begin = opened.pop(place)
            parts[begin:] = [(text, weight * factor) for text, weight in parts[begin:]]
        return place is not None

    for match in _TOKEN.finditer(prompt):
        token, number = match[0], match[1]
        if token in ("(", "["):
            opened.append((token, len(parts)))
            continue
        if number is not None and float(number) < 0:
            raise InvalidValue(f"prompt has {show(token)}: a weight must be 0 or more", param=NAME)
        is_closed = (
            (number is not None and close("(", float(number)))
            or (token == ")" and close("(", _FACTOR))
            or (token == "]" and close("[", 1 / _FACTOR))
        )
        if not is_closed:
            parts.append((_ESCAPE.sub(r"\1", token) if token[0] == "\\" else token, 1.0))
    for kind, _ in list(opened):  # an unclosed bracket weights the rest of the prompt
        close(kind, _FACTOR if kind == "(" else 1 / _FACTOR)
    joined = list[tuple[str, float]]()
    for text, weight in parts:
        if joined and joined[-1][1] == weight:
            text = joined.pop()[0] + text
        joined.append((text, weight))
    return joined or [("", 1.0)]


def check_weights(card: Card, task: Task, wish: Any, arguments: Mapping[str, Any]) -> bool | None:
    """Check `prompt_weights`; returns whether weights are read, None if the request has no value.

    Raises:
        Rejected: the model has no reader, or a weight or another argument is not supported.
    """
    if wish is not None and not isinstance(wish, bool):
        raise InvalidValue.of(NAME, wish, "must be true or false")
    if not wish:
        return wish
    if task.makes == "text" or card.weights_reader != "compel":
        raise UnsupportedParameter(f"{NAME}: {without_reader(card)}", param=NAME)
    if not isinstance(arguments.get("prompt"), str):
        raise InvalidValue(f"{NAME}: there is no prompt that could be weighted", param=NAME)
    if (arguments.get("clip_skip") or 0) > (0 if task.takes("prompt_2") else 1):
        rule = "weighted prompts take clip_skip=1 of SD 1.5, and no other"
        raise UnsupportedParameter(f"{NAME}: {rule}", param="clip_skip")
    for name in PROMPTS:
        if isinstance(text := arguments.get(name), str):
            fragments(text)
    return True


def without_reader(card: Card) -> str:
    """Explain why a model reads no weights, with the fix."""
    if card.weights_reader == "compel":
        return f"send {NAME}=true to have weights read"
    if card.weights_reader == "missing":
        return "the library compel reads weights, and is not installed: pip install compel"
    return f"weights are read for pipelines of SD 1.5, SD 2 and SDXL, not {card.pipeline}"


def has_weights(prompt: str | None) -> bool:
    """Return whether a prompt in this notation has weights other than 1."""
    return any(weight != 1 for _, weight in fragments(prompt or ""))


def without_escapes(prompt: str) -> str:
    """Remove the escapes of this notation: `\\(` is a plain bracket."""
    return _ESCAPE.sub(r"\1", prompt)


def weights_warning(
    prompt: Any, param: str, card: Card, *, is_notation: bool = False, is_read: bool = False
) -> list[str]:
    """Warnings about unread weights and editing syntax in a prompt; empty if there are none.

    Args:
        is_notation: the prompt uses the full notation, with square brackets and BREAK.
        is_read: weights of the prompt are read.
    """
    text = _ESCAPE.sub(" ", prompt) if isinstance(prompt, str) else ""
    weights = _WEIGHTS.findall(text) + _BRACKETS.findall(text) * is_notation
    edits = _EDITING.findall(text) if is_notation else []
    weights = [] if is_read else [part for part in weights if part not in edits]
    rules = ((weights, without_reader(card)), (edits, "editing and composition are not applied"))
    return [
        f"{param} has {', '.join(map(show, [*dict.fromkeys(parts)][:3]))}, drawn as words: {rule}"
        for parts, rule in rules
        if parts
    ]
