"""Names of adapters: ids from file names, aliases, and the expert in a file name."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from carpool.errors import InvalidValue

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TARGET = re.compile(r"(.+)@([a-z][a-z0-9_]*)", re.DOTALL)
_NOISE = re.compile(r"(?i)(high|low)[\W_]*noise")
_MARK = re.compile(r"(?<![A-Z])(HIGH|LOW|HN|LN)(?![A-Za-z])")
_LAST = re.compile(r"(?i)(?:^|[\W_])(high|low)(?:[\W_]+[^\W_]*\d[^\W_]*)*[\W_]*$")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Public facts of an adapter: its names, and the parts that are not applied."""

    id: str
    names: tuple[str, ...] = ()  # aliases: from its file, from its trainer
    target: str = ""  # the expert that it changes, of two; empty: both, or no experts
    targets: tuple[str, ...] = ()  # modules that may be selected: its own, and both experts
    warnings: tuple[str, ...] = ()
    problem: str = ""  # why requests cannot use it; empty: they can
    digest: str = ""  # digest of the loaded file
    trainer_name: str = ""  # alias that only its trainer gave it


def adapter_id(name: str) -> str:
    """The id of an adapter from its file name: the name itself, or a sanitized one.

    It depends only on the name, so other files do not change it.
    """
    if NAME.fullmatch(name):
        return name
    raw = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    digest = blake2b(raw, digest_size=3).hexdigest()
    ascii_only = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", ascii_only).strip("._-")[:48]
    return f"{plain or 'adapter'}-{digest}"


def find_adapter(name: str, adapters: Iterable[AdapterInfo]) -> AdapterInfo | None:
    """Find an adapter by its id, the name of its file, or its trainer's name.

    Exact names win over names that differ in case, width of characters, blanks, underscores,
    hyphens or `.safetensors`; usable adapters win over unusable ones.

    Raises:
        InvalidValue: several adapters have this name.
    """
    candidates, query = list(adapters), _loose(name)
    rules: tuple[Callable[[AdapterInfo], bool], ...] = (
        lambda adapter: adapter.id == name,
        lambda adapter: name in adapter.names,
        lambda adapter: bool(query) and query in map(_loose, (adapter.id, *adapter.names)),
    )
    for rule in rules:
        matches = [candidate for candidate in candidates if rule(candidate)]
        offered = [adapter for adapter in matches if not adapter.problem] or matches
        if len(offered) > 1:
            ids = ", ".join(sorted(adapter.id for adapter in offered))
            raise InvalidValue(f"lora has {name!r}, which may be {ids}: say which", param="lora")
        if offered:
            return offered[0]
    return None


def name_for_tag(adapter: AdapterInfo, adapters: Sequence[AdapterInfo]) -> str:
    """The name of an adapter in a prompt's tag: its file's name, otherwise its id."""
    for name in reversed(adapter.names):
        is_plain = not re.search(r"[:<>]", name) and name != adapter.trainer_name
        if is_plain and sum(name in (adapter.id, *adapter.names) for adapter in adapters) == 1:
            return name
    return adapter.id


def split_target(place: str) -> tuple[str, str]:
    """Split `FILE@transformer_2` into path and module; an existing file is never split."""
    match = _TARGET.fullmatch(place)
    if match is None or Path(place).expanduser().exists():
        return place, ""
    return match[1], match[2]


def expert_of(name: str) -> int | None:
    """Infer the expert of a file from its name, as in Wan 2.2: 0 high noise, 1 low noise.

    `high_noise` and `LowNoise` match anywhere; HIGH and LOW (or HN, LN) match as words in capitals;
    as the last word before a version any spelling matches. `low_poly_v2` does not match.
    """
    for pattern in (_NOISE, _MARK, _LAST):
        marks = {match[1][0].lower() for match in pattern.finditer(name)}
        if len(marks) == 1:
            return 0 if marks == {"h"} else 1
        if marks:
            return None  # the name has both
    return None


def names_of(path: Sequence[str]) -> tuple[str, ...]:
    """Aliases of a file in sub-folders: its whole path, and the last part."""
    return tuple(dict.fromkeys(_normal(name) for name in ("/".join(path), path[-1])))


def _normal(name: str) -> str:
    """Normalize a name, and replace bytes that are not valid text."""
    return unicodedata.normalize("NFC", name).encode("utf-8", "replace").decode()


def _loose(name: str) -> str:
    plain = unicodedata.normalize("NFKC", name).casefold().removesuffix(".safetensors")
    return re.sub(r"[\s_-]+", "_", plain).strip("_")
