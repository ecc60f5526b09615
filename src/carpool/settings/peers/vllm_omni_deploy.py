"""Settings from a deploy file in vLLM-Omni's format: YAML with an entry for each stage.

    stage_args:
      - stage_id: 0
        stage_type: diffusion
        engine_args: {max_num_seqs: 4, request_batch_max_wait_ms: 20}

and the flat form of its newer versions:

    stages:
      - stage_id: 0
        max_num_seqs: 4

Carpool runs the whole pipeline in one engine, so it reads only the diffusion stage. `Deploy.unused`
lists keys without effect, for a warning; a key that looks like a misspelled supported key is an
error.

Source: vLLM-Omni 0.30, deploy configuration.
"""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from carpool import jsonfile
from carpool.errors import SettingRejected, nearest
from carpool.settings.peers.vllm_omni_stages import diffusion_stages, overlaid
from carpool.settings.preparation import DTYPES
from carpool.settings.rules import FINITE, Count, Switch, Text, check_entry
from carpool.settings.yaml_file import read_yaml

FORMS = ("stages", "stage_args")
ALIASES = {"half": "float16", "float": "float32"}
SUPPORTED: dict[str, Any] = {
    "model": Text,
    "revision": Text,
    "dtype": Literal[(*DTYPES, *ALIASES)],
    "max_num_seqs": Count,
    "request_batch_max_wait_ms": Annotated[
        float, Meta(ge=0, le=FINITE, description="a number of milliseconds, at least 0")
    ],
    "step_execution": Switch,
    "default_sampling_params": Annotated[dict[str, Any], Meta(description="a mapping")],
}
MOST_BASES = 8  # length of a chain of base files
INSIDE = ("engine_args", "engine_extras")  # mappings in a stage that hold more of its keys


@dataclass(frozen=True, slots=True)
class Deploy:
    """The contents of a deploy file."""

    settings: dict[str, Any]  # under Carpool's names
    unused: tuple[str, ...]  # places of keys without effect


def load_deploy(path: Path | None, overrides: str | None = None) -> Deploy:
    """Read a deploy file, and JSON overrides of its stages, `{"STAGE_ID": {...}}`.

    `max_num_seqs` and `request_batch_max_wait_ms` select mode `request`. With
    `step_execution: true` the mode is `continuous`, and `max_num_seqs` its `max_running`.

    Raises:
        SettingRejected: the file is unreadable or invalid; the message names the key, and for an
            unknown key the nearest valid one.
    """
    data, names = ({}, []) if path is None else _read(path, MOST_BASES)
    if overrides is not None:
        data = overlaid(data, _stages_of(overrides))
    source = "--stage-overrides" if path is None else f"deploy config {path}"
    return parse_deploy(data, source, names)


def _stages_of(overrides: str) -> dict[str, Any]:
    """Convert overrides of stages to the form of a deploy file."""
    rule = """must be JSON such as '{"0": {"max_num_seqs": 4}}', by stage_id"""
    try:
        stages = jsonfile.loads(overrides)
    except ValueError as error:
        raise SettingRejected(f"--stage-overrides: {rule}: {error}") from error
    if not isinstance(stages, dict) or not all(
        key.isdecimal() and isinstance(stage, dict) for key, stage in stages.items()
    ):
        raise SettingRejected(f"--stage-overrides: {overrides!r:.60}: {rule}")
    return {"stages": [{"stage_id": int(key), **stage} for key, stage in stages.items()]}


def _read(path: Path, max_depth: int) -> tuple[Any, list[str]]:
    """Read a file merged over its base files, and the names of all files."""
    source = f"deploy config {path}"
    data = read_yaml(path, source)
    if not isinstance(data, dict) or data.get("base_config") is None:
        return data, [path.stem]
    base = data.pop("base_config")
    if not isinstance(base, str) or not max_depth:
        rule = "must be a file's name" if max_depth else f"is behind {MOST_BASES} others: too many"
        raise SettingRejected(f"{source}: base_config {base!r:.60}: {rule}", param="base_config")
    below, names = _read(path.parent / base, max_depth - 1)
    return overlaid(below, data), [path.stem, *names]


def parse_deploy(data: Any, source: str, names: Sequence[str] = ()) -> Deploy:
    """Convert decoded YAML, merged with its base; messages begin with `source`.

    Args:
        names: names of the files; without a `pipeline` key they may name the pipeline.
    """
    above = _mapping(data, source)
    unused: list[str] = []
    for key in above:
        if key in SUPPORTED and key != "dtype":
            raise _unknown(source, key, ": it belongs into an entry of stages")
        if key not in ("dtype", *FORMS):
            _check_spelling(key, {"dtype", *FORMS}, source)
            unused.append(key)
    values = {"dtype": above["dtype"]} if "dtype" in above else {}
    pipelines = [str(above["pipeline"])] if "pipeline" in above else list(names)
    place, stage = _stage(above, source, pipelines, unused)
    values |= _flat(stage, f"{source}: {place}")
    unused += [f"{place}.{key}" for key in values if key not in SUPPORTED]
    settings = {key: values[key] for key in SUPPORTED if key in values}
    for key, value in settings.items():
        check_entry(source, key, value, SUPPORTED[key])
    if "dtype" in settings:
        settings["dtype"] = ALIASES.get(settings["dtype"], settings["dtype"])
    if "default_sampling_params" in settings:
        settings["default_sampling_params"] = json.dumps(settings["default_sampling_params"])
    return _by_mode(settings, unused, place)


def _stage(
    above: dict[str, Any], source: str, pipelines: list[str], unused: list[str]
) -> tuple[str, dict[str, Any]]:
    """Find the diffusion stage and its place; other stages become unused."""
    forms = [form for form in FORMS if form in above]
    if len(forms) != 1:
        problem = "both stages and stage_args" if forms else "neither stages nor stage_args"
        raise SettingRejected(f"{source} has {problem}: write stages, a list with one entry")
    stages = above[forms[0]]
    if not isinstance(stages, list) or not stages:
        raise SettingRejected(f"{source}: {forms[0]} must be a list with at least one entry")
    entries = {
        f"{forms[0]}[{i}]": _mapping(stage, f"{source}: {forms[0]}[{i}]")
        for i, stage in enumerate(stages)
    }
    fitting = diffusion_stages(entries, pipelines)
    if len(fitting) != 1:
        count = f"{len(fitting)} of the {len(entries)} entries of {forms[0]}"
        rule = "must be one: write stage_type: diffusion into it, or leave the others out"
        problem = f"{count} can be the diffusion stage, {rule}"
        text = f"{source}: {problem}; Carpool runs no language or speech models"
        raise SettingRejected(text, param="stage_type")
    unused += [f"{key}, which is no diffusion stage," for key in entries if key not in fitting]
    return fitting[0], entries[fitting[0]]


def _flat(stage: dict[str, Any], where: str) -> dict[str, Any]:
    """A stage's keys, with the keys of its `engine_args` and `engine_extras`."""
    flat: dict[str, Any] = {}
    inner = {key: _mapping(stage[key], f"{where}.{key}") for key in INSIDE if key in stage}
    outer = {key: value for key, value in stage.items() if key not in INSIDE}
    for level in (outer, *inner.values()):
        for key, value in level.items():
            _check_spelling(key, {*SUPPORTED, *INSIDE}, where)
            if key in flat and flat[key] != value:
                problem = f"{key} is {flat[key]!r:.60} and {value!r:.60}: give it once"
                raise SettingRejected(f"{where}: {problem}", param=key)
            flat[key] = value
    return {key: value for key, value in flat.items() if key not in ("stage_id", "stage_type")}


def _by_mode(settings: dict[str, Any], unused: list[str], place: str) -> Deploy:
    """Rename settings to Carpool's, by the file's mode."""
    by_steps = settings.pop("step_execution", False)
    if by_steps:
        settings["batching_mode"] = "continuous"
        if "max_num_seqs" in settings:
            settings["max_running"] = settings.pop("max_num_seqs")
        if settings.pop("request_batch_max_wait_ms", None) is not None:
            unused.append(f"{place}.request_batch_max_wait_ms")
    elif settings.keys() & {"max_num_seqs", "request_batch_max_wait_ms"}:
        settings["batching_mode"] = "request"
    return Deploy(settings, tuple(unused))


def _mapping(data: Any, where: str) -> dict[str, Any]:
    """Check a mapping with text keys, and drop null values."""
    if not isinstance(data, Mapping):
        raise SettingRejected(f"{where} is {data!r:.60}: must be a mapping")
    for key in data:
        if not isinstance(key, str):
            raise SettingRejected(f"{where}: key {key!r:.60}: must be text")
    return {key: value for key, value in data.items() if value is not None}


def _check_spelling(key: str, supported: Collection[str], where: str) -> None:
    """Refuse an unknown key that is close to a supported key."""
    is_close = difflib.get_close_matches(key[:100], supported, n=1, cutoff=0.8)
    if key not in supported and is_close:
        raise _unknown(where, key, nearest(key, supported))


def _unknown(where: str, key: str, hint: str) -> SettingRejected:
    return SettingRejected(f"{where}: unknown key {key!r:.60}{hint}", param=key)
