"""Pictures in JSON that are their own parameters (ControlNet, IP-Adapter), in nested lists too.

`{"control_image": "data:..."}`, `{"ip_adapter_image": [[{"image_url": ...}], ...]}`:
clients nest the lists as the pipeline takes them. `input_images` reads the edited picture and its
mask, except in nested lists, as several ControlNets take them: those are read here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from carpool.errors import InvalidValue
from carpool.media.reader import ImageIntake
from carpool.media.uploads import Mode, digest_of
from carpool.request.card import Card
from carpool.request.images import MASKS, PICTURES
from carpool.request.sizes import within

NAMES = tuple(name for name in (*PICTURES, *MASKS) if name not in ("image", "mask_image"))
MOST_PICTURES = 64  # pictures of a request

Nested = dict[str, Any]
"""Pictures by parameter, as they were sent; or nested lists of pictures."""


def taken(values: dict[str, Any], card: Card) -> Nested:
    """Remove from a body, and return, the pictures for parameters of the model's tasks."""
    names = [name for name in NAMES if any(task.takes(name) for task in card.tasks)]
    return {name: values.pop(name) for name in names if values.get(name) is not None}


def pictures_in(value: Any) -> Iterator[Any]:
    """Yield the entries of nested lists, in order."""
    if isinstance(value, list):
        for entry in value:
            yield from pictures_in(entry)
    else:
        yield value


def check_count(nested: Mapping[str, Any]) -> None:
    """Refuse more pictures than a request may have."""
    if (count := sum(1 for _ in pictures_in([*nested.values()]))) > MOST_PICTURES:
        first = next(iter(nested))
        rule = f"must be at most {MOST_PICTURES}"
        raise InvalidValue(f"{', '.join(nested)} have {count} pictures: {rule}", param=first)


def digests_of(nested: Mapping[str, Any]) -> list[str]:
    """Digests of the sent pictures, each with its parameter and list position. Slow."""

    def label(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(label, value))}]"
        return digest_of(value if isinstance(value, (str, memoryview)) else repr(value))

    return [f"{name}:{label(nested[name])}" for name in sorted(nested)]


async def decoded(
    nested: Mapping[str, Any], card: Card, intake: ImageIntake, url: Any
) -> dict[str, Any]:
    """Decode the pictures into pipeline arguments, in the same nested lists.

    Args:
        url: returns the URL of a picture reference; its name is for errors.

    Raises:
        Rejected, BodyTooLarge: a picture breaks a rule.
    """

    async def read(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [await read(name, entry) for entry in value]
        mode: Mode = "L" if name in MASKS else "RGB"
        picture = await intake.open(url(value, name), name)
        fitted = within(picture.size, card.max_pixels, 1)
        return await intake.decode(picture, name, mode=mode, fitted=fitted)

    return {name: await read(name, value) for name, value in nested.items()}
