"""Adapter tags in the prompts of AUTOMATIC1111's web interface: `<lora:NAME:0.8>`.

A tag has fields between colons: a name, the text encoders' scale (default 1), the denoiser's scale
(default: the same), and a rank; the last three also by name, as `te=`, `unet=` and `dyn=`. That
program removes every `<word:...>` from the prompt, known or not. Here a tag never stays in the
prompt either: one that cannot be applied is refused by name.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from carpool.errors import InvalidValue, UnsupportedParameter, show
from carpool.request.adapter_names import AdapterInfo, find_adapter

_TAG = re.compile(r"(?:(?<![ \t])[ \t]++)?<(\w+):([^>]{1,500})>")  # and the blanks before it
_BROKEN = re.compile(r"<\s*(?:lora|lyco|hypernet)\b[^>]{0,40}>?", re.IGNORECASE)
_KINDS = ("lora", "lyco")  # synonyms since version 1.5
_FORM = "write <lora:NAME:SCALE>"
_SCALES = ("te", "unet")
_TEXT_ENCODER = "text_encoder"  # prefix of those modules' names


@dataclass(frozen=True, slots=True)
class Tag:
    """An adapter that a prompt names."""

    name: str
    scale: float  # scale of the denoiser
    text_scale: float  # scale of text encoders


def split_tags(prompt: str) -> tuple[str, list[Tag]]:
    """Split a prompt into its text and its adapter tags.

    Returns:
        The text, and its tags.

    Raises:
        InvalidValue, UnsupportedParameter: a tag cannot be applied.
    """
    tags = list(_TAG.finditer(prompt))
    text = _TAG.sub("", prompt).strip() if tags else prompt
    if match := _BROKEN.search(text):
        raise InvalidValue(
            f"prompt has an incomplete tag, {show(match[0])}: {_FORM}", param="prompt"
        )
    return text, [_tag(tag[1], tag[2]) for tag in tags]


def adapters_of(tags: Iterable[Tag], adapters: Sequence[AdapterInfo]) -> list[dict[str, Any]]:
    """The `lora` field of a request; text encoders get own entries if their scale differs.

    Args:
        adapters: the adapters that a prompt may name.

    Raises:
        InvalidValue, UnsupportedParameter: an adapter's name is ambiguous, or its modules are
            unknown.
    """
    return [entry for tag in tags for entry in _entries(tag, adapters)]


def _entries(tag: Tag, adapters: Sequence[AdapterInfo]) -> list[dict[str, Any]]:
    whole = {"id": tag.name, "scale": tag.scale}
    if tag.scale == tag.text_scale:
        return [whole]
    adapter, target = find_adapter(tag.name, adapters), ""
    if adapter is None and "@" in tag.name:
        name, _, target = tag.name.rpartition("@")
        adapter = find_adapter(name, adapters)
    if adapter is None or not adapter.targets:
        text = f"te={tag.text_scale:g}, unet={tag.scale:g}"
        rule = "the modules that it changes are unknown: give one scale"
        raise UnsupportedParameter(f"lora has {show(tag.name)} with {text}: {rule}", param="lora")
    texts = [name for name in adapter.targets if name.startswith(_TEXT_ENCODER)]
    if target.startswith(_TEXT_ENCODER) or len(texts) == len(adapter.targets):
        return [whole | {"scale": tag.text_scale}]
    if target:
        return [whole]
    return [whole, *(whole | {"target": name, "scale": tag.text_scale} for name in texts)]


def refuse_tags(prompt: str, param: str) -> None:
    """Refuse adapter tags in a prompt where they are not applied."""
    if tag := _TAG.search(prompt) or _BROKEN.search(prompt):
        text = show(tag[0].strip())
        raise UnsupportedParameter(f"{param} has {text}: put adapters into prompt", param=param)


def _tag(kind: str, content: str) -> Tag:
    tag = show(f"<{kind}:{content}>")
    if kind not in _KINDS:
        rule = _FORM if kind.lower() in _KINDS else f"such networks are not supported, {_FORM}"
        raise UnsupportedParameter(f"prompt has {tag}: {rule}", param="prompt")
    name, *settings = content.split(":")
    numbers, named = list[str](), dict[str, str]()
    for setting in settings:
        key, equals, value = setting.partition("=")
        if equals:
            named[key.strip()] = value
        else:
            numbers.append(setting)
    unknown = [f"{key}=" for key in named if key not in _SCALES] + numbers[2:]
    if unknown:
        rule = "is not supported: a tag has a name and a scale, or te= and unet="
        raise UnsupportedParameter(f"prompt has {tag}: {show(unknown[0])} {rule}", param="prompt")
    text_scale = _number(named.get("te", next(iter(numbers), "1")), tag)
    scale = _number(named.get("unet", next(iter(numbers[1:]), str(text_scale))), tag)
    return Tag(name.strip(), scale, text_scale)


def _number(text: str, tag: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidValue(f"prompt has {tag}: {show(text)} is no number, {_FORM}", param="prompt")
    return number
