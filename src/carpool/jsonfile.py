"""JSON that people write into files: parsed within bounds, so that a file is refused by name.

Python's parser gives up with `RecursionError`, which nobody expects of a file, or takes what other
code then cannot walk through.
"""

import json
from pathlib import Path
from typing import Any

MOST_DEPTH = 64  # of lists and objects inside each other
MOST_BYTES = 16 << 20  # of a file


def read(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file, however large it says it is.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `most_bytes`.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return content


def loads(text: str | bytes, **options: Any) -> Any:
    """Parse JSON; `options` are those of `json.loads`.

    Raises:
        ValueError: it is none, or nests lists and objects more than `MOST_DEPTH` deep.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise too_deep() from None
    if is_deeper(value, MOST_DEPTH):
        raise too_deep()
    return value


def is_deeper(value: Any, max_depth: int) -> bool:
    """Does a value nest lists and objects more than so many deep?"""
    level: list[Any] = [[value]]
    for _ in range(max_depth + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def too_deep() -> ValueError:
    return ValueError(f"it nests lists or objects more than {MOST_DEPTH} deep")
