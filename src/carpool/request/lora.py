"""Adapters (LoRA) in requests and settings: names, scales, and the rules for both.

A request sends `lora=[{"id": NAME, "scale": 0.8}, ...]`. Names come from the operator's settings or
from files in a folder; requests never name paths of weights. No torch: the front process uses this
module too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.errors import (
    InvalidValue,
    LoraRejected,
    SettingRejected,
    UnsupportedParameter,
    nearest,
)
from carpool.models.damage import problem_of
from carpool.request.adapter_names import NAME, AdapterInfo, find_adapter
from carpool.request.values import is_number

MAX_SCALE = 10.0
SUFFIX = ".safetensors"
ATTENTION = ("joint_attention_kwargs", "cross_attention_kwargs", "attention_kwargs")

STANDARD = ("pytorch_lora_weights", "adapter_model")  # standard file names in adapter folders

_ENTRY = '{"id": NAME, "scale": NUMBER}'

AdapterScales = tuple[tuple[str, float], ...]
"""Adapters of one request with their scales, in the request's order. An id may end in one of two
experts, as `style@transformer_2`."""


def check_lora(
    entries: Any, known: Sequence[str], adapters: Sequence[AdapterInfo] = ()
) -> AdapterScales:
    """Check the adapters of a request; scale 0 means no adapter.

    Args:
        entries: `[{"id": NAME, "scale": NUMBER, "target": MODULE}, ...]`, scale 1 by default; or
            None. A name is an adapter's id or file name. An entry without a target applies to all
            modules that no other entry of the adapter names.
        known: ids of the usable adapters.
        adapters: facts of these and of unusable adapters.

    Raises:
        InvalidValue: the message has the value, the rule, and the nearest adapter.
    """
    if entries is None:
        return ()
    if not isinstance(entries, (list, tuple)):
        raise _wrong(f"a {type(entries).__name__}: must be a list of entries {_ENTRY}")
    described = {adapter.id for adapter in adapters}
    infos = [*adapters, *(AdapterInfo(name) for name in known if name not in described)]
    scales: dict[str, float] = {}
    for entry in entries:
        names = {"id", "scale", "target"}
        if not isinstance(entry, Mapping) or not {"id"} <= entry.keys() <= names:
            raise _wrong(f"an entry {_cut(entry)}: must be {_ENTRY}; scale is 1 where left out")
        name = _adapter(entry["id"], entry.get("target"), known, infos)
        scale = entry.get("scale", 1.0)
        if name in scales:
            raise _wrong(f"{name!r} twice: name each adapter once, with its whole scale")
        if not is_number(scale) or not -MAX_SCALE <= scale <= MAX_SCALE:
            rule = f"must be a number from -{MAX_SCALE:g} to {MAX_SCALE:g}"
            raise _wrong(f"scale {_cut(scale)} of {name!r}: {rule}")
        scales[name] = float(scale)
    apart = _modules_apart(scales, infos)
    return tuple((name, scale) for name, scale in apart.items() if scale)


def _modules_apart(
    scales: Mapping[str, float], adapters: Sequence[AdapterInfo]
) -> dict[str, float]:
    """Remove from an adapter's general entry the modules that have their own entry."""
    infos = {info.id: info for info in adapters}
    apart = dict[str, float]()
    for name, scale in scales.items():
        info = infos.get(name, AdapterInfo(name))
        parts = [f"{name}@{module}" for module in ((info.target,) if info.target else info.targets)]
        missing = {part: scale for part in parts if part not in scales}
        apart |= {name: scale} if len(missing) == len(parts) else missing
    return apart


def _adapter(name: Any, target: Any, names: Sequence[str], adapters: Sequence[AdapterInfo]) -> str:
    """The id of an entry's adapter, with the expert if it is not the adapter's default."""
    if not isinstance(name, str):
        raise _wrong(f"no adapter {_cut(name)}{_hint(name, names)}")
    adapter = find_adapter(name, adapters)
    if adapter is None and target is None and "@" in name:
        name, _, target = name.rpartition("@")
        adapter = find_adapter(name, adapters)
    if adapter is None:
        raise _wrong(f"no adapter {_cut(name)}{_hint(name, names)}")
    if adapter.problem:
        raise _wrong(f"adapter {_cut(name)}, which cannot be used: {adapter.problem}")
    if adapter.id not in names:
        raise _wrong(f"no adapter {_cut(name)} any more: its file is gone")
    if target in (None, "all", adapter.target or None) or (target,) == adapter.targets:
        return adapter.id
    if target not in adapter.targets:
        rule = f"must be one of {', '.join(('all', *adapter.targets))}"
        raise _wrong(f"target {_cut(target)} of {name!r}: {rule}")
    return f"{adapter.id}@{target}"


def refuse_scale(name: str, value: Any) -> None:
    """Refuse diffusers' common scale for all adapters of a pipeline.

    It does not reach the engine's adapters. In Python, for a model without these, it scales the
    adapters that the user loaded into the pipeline, as in diffusers.
    """
    if name in ATTENTION and isinstance(value, Mapping) and "scale" in value:
        raise UnsupportedParameter(
            f"{name} has a scale, which is one for all adapters: use lora, a list of {_ENTRY}",
            param=name,
        )


def check_name(name: Any, used_names: Sequence[str] = ()) -> str:
    """Check the name of a new adapter.

    Raises:
        LoraRejected: the name breaks the rule, or is taken.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise LoraRejected(
            f"adapter name {_cut(name)}: must be 1 to 64 letters, digits, '.', '_' or '-', the "
            "first one a letter or digit"
        )
    if name in used_names:
        raise LoraRejected(f"there is an adapter {name!r} already: choose another name")
    return name


def parse_lora(entries: Sequence[str]) -> dict[str, str]:
    """Parse the setting's entries, each `NAME=PATH`, to paths by name.

    Raises:
        SettingRejected, LoraRejected: an entry without a path, or a name that breaks the rule.
    """
    paths: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (equals and path):
            raise SettingRejected(f"lora={entry!r}: write NAME=PATH, as style=./style.safetensors")
        paths[check_name(name, list(paths))] = path
    return paths


def adapter_file(path: Path) -> Path:
    """Find the safetensors file of an adapter. Pickles could run code and are never opened.

    Raises:
        LoraRejected: there is no such file.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
        files = [file for file in files if file.stem in STANDARD] or files
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise LoraRejected(f"{path} must hold one {SUFFIX} file, it has: {names}")
        return files[0]
    if path.suffix.lower() != SUFFIX:
        raise LoraRejected(f"{path} is not a {SUFFIX} file, and a pickle can run code")
    if not path.is_file():
        raise LoraRejected(f"there is no file {path}")
    return path


def check_header(file: Path) -> None:
    """Check the header of a safetensors file: it reveals a truncated download.

    Raises:
        LoraRejected: not a safetensors file.
    """
    if (problem := problem_of(file)) is not None:
        raise LoraRejected(f"{file.name} is not a readable {SUFFIX} file: it {problem}")


def _wrong(problem: str) -> InvalidValue:
    return InvalidValue(f"lora has {problem}", param="lora")


def _hint(name: Any, names: Sequence[str]) -> str:
    if not names:
        return ": none is registered; the server's --lora NAME=PATH does that"
    return f"{nearest(str(name), names)} (there are: {', '.join(sorted(names))})"


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
