"""Rules for text requests: the conversation, sampling, and stop texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.errors import InvalidValue, MissingParameter, UnsupportedParameter, show
from carpool.request.card import Task

MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # texts, characters; searched at every token
ROLES = ("system", "user", "assistant")
_RANGES: dict[str, tuple[float, float, bool]] = {  # from, to, lower bound excluded
    "temperature": (0, 100, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "top_k": (0, 2**31, False),
    "repetition_penalty": (0, 100, True),
}


def check_text(task: Task, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a language model.

    Raises:
        Rejected: the message has the value and the rule.
    """
    prompt, messages = arguments.get("prompt"), arguments.get("messages")
    if (prompt is None) == (messages is None):
        rule = "give prompt, a text to be continued, or messages, a conversation; not both"
        raise MissingParameter(f"prompt or messages: {rule}", param="messages")
    for name, (low, high, is_above) in _RANGES.items():
        value = arguments.get(name)
        if value is not None and not (low < value <= high if is_above else low <= value <= high):
            limits = f"above {low}, at most {high}" if is_above else f"from {low} to {high}"
            raise InvalidValue.of(name, value, f"must be {limits}")
    _check_stops(arguments.get("stop") or ())
    if prompt is not None:
        pictures, words = 0, prompt
    else:
        pictures, words = _checked_messages(messages or ())
    images = arguments.get("image")
    count = len(images) if isinstance(images, (list, tuple)) else int(images is not None)
    if pictures and not task.takes("image"):
        rule = "it reads texts alone: leave them out"
        raise UnsupportedParameter(f"messages have {pictures} pictures: {rule}", param="messages")
    if pictures != count:
        seen = f"image has {count} pictures, messages {pictures}"
        raise InvalidValue(f"{seen}: each needs a part of type image", param="image")
    if not words.strip() and not pictures:
        name = "prompt is empty" if messages is None else "messages have no text of the user"
        raise InvalidValue(f"{name}: write at least a word", param=name.split()[0])


def _check_stops(stops: Sequence[Any]) -> None:
    if len(stops) > MAX_STOPS:
        rule = f"must have at most {MAX_STOPS}"
        raise InvalidValue(f"stop has {len(stops)} texts: {rule}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            rule = f"must be texts of 1 to {MAX_STOP_LENGTH} characters"
            raise InvalidValue(f"stop has {show(stop)}: {rule}", param="stop")


def _checked_messages(messages: Sequence[Any]) -> tuple[int, str]:
    """Check a conversation; returns its number of pictures, and the user's text."""
    pictures, words = 0, list[str]()
    if not messages:
        raise InvalidValue("messages is an empty list: send at least one", param="messages")
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            rule = f"must be one of {', '.join(ROLES)}"
            raise InvalidValue(f"a message has role {show(role)}: {rule}", param="messages")
        content = message.get("content")
        parts = [content] if isinstance(content, str) else content or []
        for part in parts if isinstance(parts, (list, tuple)) else [None]:
            match part:
                case str(text) | {"type": "text", "text": str(text)}:
                    words += [text] if role == "user" else []
                case {"type": "image"}:
                    pictures += 1
                case _:
                    rule = "must be a text, or a list of parts of type text and image"
                    raise InvalidValue(f"content {show(content)}: {rule}", param="messages")
    return pictures, "".join(words)
