"""Files of settings that are nested without end, or grow: refused by their names, and soon."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from carpool import jsonfile
from carpool.cli.generate import pairs
from carpool.config import EngineSettings
from carpool.errors import InvalidValue, LoadFailed, LoraRejected, SettingRejected
from carpool.jobs.database import _loads
from carpool.schedule.cost import Costs
from carpool.schedule.policy import build, reload
from carpool.settings.peers.sglang_rules import Server, load_rules
from carpool.settings.peers.vllm_omni_deploy import load_deploy
from carpool.telemetry.sglang_metrics import Dispatches
from carpool_lab.simulate.command import simulate
from carpool_lab.workload import generators, read_mix, read_trace
from support.engine_driver import driving
from support.lora_files import adapter
from support.tiny import checkpoint

SERVER = Server("tiny", None, False)


def nested(depth: int, inner: str = "", *, opens: str = "[", closes: str = "]") -> str:
    return opens * depth + inner + closes * depth


DEPTHS = [100, 900, 2000, 200_000]
OBJECTS = {"opens": '{"a":', "closes": "}", "inner": "1"}
RULE = '{{"model": "tiny", "max_batch_size": 2, "calibration": {}}}'
DEEP: dict[str, Callable[[int], str]] = {
    "lists": nested,
    "objects": lambda depth: nested(depth, **OBJECTS),
    "without an end": lambda depth: "[" * depth,
    "inside a rule": lambda depth: f"[{RULE.format(nested(depth))}]",
    "as a value": lambda depth: f'[{{"model": "tiny", "max_batch_size": {nested(depth)}}}]',
}


@given(st.integers(0, 200), st.booleans())
def test_json_is_parsed_up_to_a_depth(depth: int, is_object: bool) -> None:
    text = nested(depth, **OBJECTS) if is_object else nested(depth, "1")

    if depth <= jsonfile.MOST_DEPTH:
        assert jsonfile.loads(text) == json.loads(text)
    else:
        with pytest.raises(ValueError, match="more than 64 deep"):
            jsonfile.loads(text)


# Batching rules


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", DEEP)
def test_batching_rules_that_nest_too_deep_are_refused_by_the_files_name(
    tmp_path: Path, kind: str, depth: int
) -> None:
    file = tmp_path / "rules.json"
    file.write_text(DEEP[kind](depth))

    with pytest.raises(SettingRejected) as refused:
        load_rules(file)

    assert str(refused.value).startswith(f"batching config {file} cannot be read: ")
    assert len(str(refused.value)) < 300


def test_at_a_hangup_too_and_the_old_rules_stay(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(f"[{RULE.format('null')}]")
    settings = EngineSettings(batching_mode="dynamic", batching_config=str(file))
    policy = build(settings, Costs(), SERVER, Dispatches(), lambda line: None)
    before = policy.caps  # type: ignore[attr-defined]

    file.write_text(nested(200_000))

    with pytest.raises(SettingRejected, match=f"{file} cannot be read: it nests"):
        reload(policy, settings, SERVER)
    assert policy.caps is before  # type: ignore[attr-defined]


def test_a_rule_of_a_huge_wrong_value_is_told_in_short(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(json.dumps([{"model": "m", "max_batch_size": ["x" * 99] * 9999}]))

    with pytest.raises(SettingRejected) as refused:
        load_rules(file)

    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("read", [load_rules, load_deploy])
def test_a_file_without_an_end_is_refused(read: Callable[[Path], Any]) -> None:
    with pytest.raises(SettingRejected, match="/dev/zero cannot be read: it has more than"):
        read(Path("/dev/zero"))


# Deploy files

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: 1}}\n" for n in range(1, 60)
)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "deep",
    [
        nested,
        lambda depth: nested(depth, opens="{a: ", closes="}"),
        lambda depth: "[" * depth,
        lambda depth: "- " * depth + "x",
        lambda depth: "\n".join(" " * n + "a:" for n in range(min(depth, 1000))),
        lambda depth: "stages: [{stage_id: 0, max_num_seqs: " + nested(depth) + "}]",
    ],
)
def test_a_deploy_file_that_nests_too_deep_is_refused_by_its_name(
    tmp_path: Path, deep: Callable[[int], str], depth: int
) -> None:
    told, took_s = refused(tmp_path, deep(depth))

    assert "more than 64 deep" in told
    assert took_s < 5


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        MERGES,
        BOMB + "stages: [{stage_id: 0, max_num_seqs: *a59}]",
        BOMB + "stages: [{stage_id: 0, model: *a59, engine_args: {model: *a58}}]",
    ],
)
def test_a_deploy_file_that_grows_by_its_aliases_is_refused(tmp_path: Path, text: str) -> None:
    told, took_s = refused(tmp_path, text)

    assert "more than 10000 entries with aliases expanded" in told
    assert took_s < 5


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "a: *nobody"])
def test_an_alias_of_what_it_stands_in_is_refused(tmp_path: Path, text: str) -> None:
    assert "alias" in refused(tmp_path, text)[0]


def test_aliases_and_merges_as_people_write_them_are_read(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(
        "stages:\n  - &one {stage_id: 0, max_num_seqs: 4}\n"
        "  - {<<: *one, stage_id: 1, stage_type: llm}\n"
    )

    assert load_deploy(file).settings == {"batching_mode": "request", "max_num_seqs": 4}


def refused(folder: Path, text: str) -> tuple[str, float]:
    """Why a deploy file is refused, and after how many seconds of work."""
    file = folder / "deploy.yaml"
    file.write_text(text)
    began_s = time.process_time()
    with pytest.raises(SettingRejected) as told:
        load_deploy(file)
    assert str(told.value).startswith(f"deploy config {file} cannot be read: ")
    assert len(str(told.value)) < 500
    return str(told.value), time.process_time() - began_s


# Mixes, traces, tables


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("line", ["{}", '{{"at_s": 0, "x": {}}}', "[{}]"])
def test_traces_and_mixes_that_nest_too_deep_are_refused(line: str, depth: int) -> None:
    text, rng = line.format(nested(depth)), generators(0)[0]

    for read in (lambda: read_mix(text, {}), lambda: read_trace(text, read_mix("{}", {}), rng)):
        with pytest.raises(InvalidValue, match="neither JSON lines nor a JSON list: it nests"):
            read()


def test_a_number_of_too_many_digits_in_a_trace_is_refused() -> None:
    with pytest.raises(InvalidValue, match="neither JSON lines nor a JSON list"):
        read_mix('{"x": ' + "1" * 5000 + "}", {})


@pytest.mark.parametrize("flag", ["--table", "--costs", "--mix", "--trace"])
def test_the_simulator_names_a_file_that_nests_too_deep(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "deep.json"
    file.write_text(nested(200_000))

    result = CliRunner().invoke(simulate, [flag, str(file)])

    assert result.exit_code == 2
    assert "it nests lists or objects more than 64 deep" in result.output
    assert str(file) in result.output


def test_a_value_on_the_command_line_that_nests_too_deep_is_text() -> None:
    text = nested(200_000)

    assert dict(pairs([f"a={text}", "b=[1]"])) == {"a": text, "b": [1]}


def test_a_spoiled_row_that_nests_without_end_reads_as_nothing() -> None:
    assert _loads(nested(200_000), dict) == {}
    assert _loads(nested(200_000), list) == []


# With a model: these bring torch


@pytest.mark.parametrize("name", ["carpool.json", "model_index.json", "scheduler"])
@pytest.mark.parametrize("depth", [900, 200_000])
def test_a_model_whose_files_nest_too_deep_is_refused_by_its_name(
    tmp_path: Path, name: str, depth: int
) -> None:
    from carpool.engine.model.load import load

    folder = shutil.copytree(checkpoint("flux"), tmp_path / "m", copy_function=os.link)
    file = folder / name if name.endswith("json") else folder / name / "scheduler_config.json"
    file.unlink(missing_ok=True)
    file.write_text(f'{{"deep": {nested(depth)}}}')

    with pytest.raises(LoadFailed, match=str(folder)):
        load(folder, EngineSettings())


@pytest.mark.parametrize("said", ["[]", '{"id": 1}', '{"defaults": []}', '{"lora": ["x"]}', "x"])
def test_a_card_file_that_is_none_is_refused_by_its_name(tmp_path: Path, said: str) -> None:
    from carpool.engine.model.load import load

    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "carpool.json").write_text(said)

    with pytest.raises(LoadFailed, match=f"{tmp_path}/carpool.json"):
        load(tmp_path, EngineSettings())


@pytest.mark.parametrize("depth", [900, 200_000])
@pytest.mark.parametrize("where", ["the header", "its metadata"])
def test_an_adapter_whose_header_nests_too_deep_is_refused_by_its_name(
    tmp_path: Path, where: str, depth: int
) -> None:
    file = adapter(tmp_path, "flux", 1)
    with file.open("rb") as whole:
        size = int.from_bytes(whole.read(8), "little")
        header, tensors = json.loads(whole.read(size)), whole.read()
    if where == "the header":
        text = json.dumps(header)[:-1] + f', "deep": {nested(depth)}}}'
    else:
        deep = {"lora_adapter_metadata": nested(depth), "format": "pt"}
        text = json.dumps(header | {"__metadata__": deep})
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + tensors)

    with driving("flux") as drive, pytest.raises(LoraRejected, match=file.stem):
        drive.engine.add_lora(file.stem, file)
