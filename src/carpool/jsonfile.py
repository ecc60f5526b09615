"""JSON in users' files: parsed with limits, so that errors can name the file.

For deep nesting Python's parser raises `RecursionError`, which callers do not expect, or returns
values that other code cannot traverse.
"""

import json
from pathlib import Path
from typing import Any

MOST_DEPTH = 64  # nesting of lists and objects
MOST_BYTES = 16 << 20  # size of a file


def read(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a file up to a limit, whatever size it reports.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than `most_bytes`.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return content


def loads(text: str | bytes, **options: Any) -> Any:
    """Parse JSON; `options` go to `json.loads`.

    Raises:
        ValueError: not JSON, or nested more than `MOST_DEPTH` deep.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise too_deep() from None
    if is_deeper(value, MOST_DEPTH):
        raise too_deep()
    return value


def is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether lists and objects are nested more than `max_depth` deep."""
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
