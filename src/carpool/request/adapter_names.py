"""Names of adapters: ids from files' names, what people call them, and the expert they are for."""

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
    """What clients may know of an adapter: how to name it, and what of it is not applied."""

    id: str
    names: tuple[str, ...] = ()  # other names: of its file, of its trainer
    target: str = ""  # the one of two experts that it changes; empty: both, or there are none
    targets: tuple[str, ...] = ()  # modules that it can change alone: its own, and both experts
    warnings: tuple[str, ...] = ()
    problem: str = ""  # why no request can have it; empty: it is offered
    digest: str = ""  # of the file that was read
    trainer_name: str = ""  # the one of its names that only its trainer gave it


def adapter_id(name: str) -> str:
    """The id of an adapter whose file is called so: the name itself, or a plain one like it.

    It depends on nothing but the name, so it stays when other files come and go.
    """
    if NAME.fullmatch(name):
        return name
    raw = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    digest = blake2b(raw, digest_size=3).hexdigest()
    ascii_only = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", ascii_only).strip("._-")[:48]
    return f"{plain or 'adapter'}-{digest}"


def find_adapter(name: str, adapters: Iterable[AdapterInfo]) -> AdapterInfo | None:
    """Find the adapter that a person means: by its id, the name of its file, or its trainer's.

    Exact names go before names that differ in capitals, in the width of characters, in blanks,
    underscores and hyphens, or by `.safetensors`; adapters that are offered before others.

    Raises:
        InvalidValue: several have this name.
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
    """The name by which a prompt's tag finds an adapter: its file's, or else its id."""
    for name in reversed(adapter.names):
        is_plain = not re.search(r"[:<>]", name) and name != adapter.trainer_name
        if is_plain and sum(name in (adapter.id, *adapter.names) for adapter in adapters) == 1:
            return name
    return adapter.id


def split_target(place: str) -> tuple[str, str]:
    """Split `FILE@transformer_2` into the path and the module; a file may have such a name."""
    match = _TARGET.fullmatch(place)
    if match is None or Path(place).expanduser().exists():
        return place, ""
    return match[1], match[2]


def expert_of(name: str) -> int | None:
    """Which of two experts a file is for, as files of Wan 2.2 are named: 0 high noise, 1 low.

    `high_noise` and `LowNoise` count anywhere, HIGH and LOW (or HN, LN) as words in capitals, and
    any spelling as the last word but for versions: `low_poly_v2` says nothing of noise.
    """
    for pattern in (_NOISE, _MARK, _LAST):
        marks = {match[1][0].lower() for match in pattern.finditer(name)}
        if len(marks) == 1:
            return 0 if marks == {"h"} else 1
        if marks:
            return None  # it names both
    return None


def names_of(path: Sequence[str]) -> tuple[str, ...]:
    """What people call a file in sub-folders: by its whole path, and by its last part."""
    return tuple(dict.fromkeys(_normal(name) for name in ("/".join(path), path[-1])))


def _normal(name: str) -> str:
    """One spelling of a name, without the bytes of names that are no text."""
    return unicodedata.normalize("NFC", name).encode("utf-8", "replace").decode()


def _loose(name: str) -> str:
    plain = unicodedata.normalize("NFKC", name).casefold().removesuffix(".safetensors")
    return re.sub(r"[\s_-]+", "_", plain).strip("_")
