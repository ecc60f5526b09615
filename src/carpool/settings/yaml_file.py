"""YAML in users' files, read with limits on its size."""

from pathlib import Path
from typing import Any

import yaml

from carpool import jsonfile
from carpool.errors import SettingRejected

MOST_BYTES = 1 << 20
MOST_ENTRIES = 10_000  # entries of lists and mappings, with keys


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice: YAML's own loader takes the last value."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # before `<<` adds other mappings' keys
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len({*names}) < len(names):
            raise ValueError(f"{max(names, key=names.count)!r:.60} is there twice")
        return node


def read_yaml(path: Path, source: str) -> Any:
    """Read a YAML file, with limits on its size.

    Raises:
        SettingRejected: it cannot be read; the message begins with `source`.
    """
    try:
        text = jsonfile.read(path, MOST_BYTES)
        _check_bounds(text)
        return yaml.load(text, Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:  # YAML's text has several lines
        raise SettingRejected(f"{source} cannot be read: {' '.join(str(error).split())}") from error


def _check_bounds(text: bytes) -> None:
    """Refuse deep nesting and alias bombs before objects are built.

    Raises:
        ValueError: a limit is exceeded.
        YAMLError: not YAML.
    """
    entries, sizes = 0, dict[str, int]()  # total with aliases expanded; size of each anchor
    inside: list[tuple[str | None, int]] = []  # stack of collections: anchor, total before it
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"alias {event.anchor!r:.60} is undefined, or refers to itself")
            entries += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            sizes |= {} if anchor is None else {anchor: entries - before}
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append((event.anchor, entries))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
            entries += 1
        if len(inside) > jsonfile.MOST_DEPTH:
            raise jsonfile.too_deep()
        if entries > MOST_ENTRIES:
            raise ValueError(f"it has more than {MOST_ENTRIES} entries with aliases expanded")
