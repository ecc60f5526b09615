"""Deploy files: both forms, what they ask for, and what is said about the rest."""

from pathlib import Path
from typing import Any

import pytest

from carpool.errors import SettingRejected
from carpool.settings.peers.vllm_omni_deploy import Deploy, load_deploy, parse_deploy

NESTED = """
stage_args:
  - stage_id: 0
    stage_type: diffusion
    engine_args:
      max_num_seqs: 4
      request_batch_max_wait_ms: 20
"""
FLAT = """
dtype: half
async_chunk: false
stages:
  - stage_id: 0
    model: Qwen/Qwen-Image
    max_num_seqs: 4
    devices: "0"
    enforce_eager: null
    engine_extras: {request_batch_max_wait_ms: 20, cache_backend: tea_cache}
"""


def deploy(**stage: Any) -> Deploy:
    return parse_deploy({"stages": [{"stage_id": 0} | stage]}, "deploy")


def test_both_forms_are_read(tmp_path: Path) -> None:
    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text(NESTED)
    flat.write_text(FLAT)

    asked = {"batching_mode": "request", "max_num_seqs": 4, "request_batch_max_wait_ms": 20}
    assert load_deploy(nested) == Deploy(asked, ())
    assert load_deploy(flat) == Deploy(
        asked | {"dtype": "float16", "model": "Qwen/Qwen-Image"},
        ("async_chunk", "stages[0].devices", "stages[0].cache_backend"),
    )


def test_a_file_that_asks_for_no_batching_leaves_the_mode_as_it_is() -> None:
    assert deploy(revision="main") == Deploy({"revision": "main"}, ())


def test_a_stages_own_dtype_wins_over_that_of_the_file() -> None:
    data = {"dtype": "float", "stages": [{"dtype": "bfloat16"}]}

    assert parse_deploy(data, "deploy").settings == {"dtype": "bfloat16"}


def test_step_execution_is_the_mode_continuous() -> None:
    asked = deploy(step_execution=True, max_num_seqs=4, request_batch_max_wait_ms=20)

    assert asked.settings == {"batching_mode": "continuous", "max_running": 4}
    assert asked.unused == ("stages[0].request_batch_max_wait_ms",)
    assert deploy(step_execution=True).settings == {"batching_mode": "continuous"}
    assert deploy(step_execution=False, max_num_seqs=2).settings["batching_mode"] == "request"


def test_of_several_stages_the_diffusion_stage_is_read_and_the_others_are_named() -> None:
    stages = [{"stage_type": "llm", "max_num_seqs": 9}, {"stage_type": "diffusion"}]

    assert parse_deploy({"stage_args": stages}, "deploy") == Deploy(
        {}, ("stage_args[0], which is no diffusion stage,",)
    )


@pytest.mark.parametrize(
    "second",
    [
        {"model_class_name": "WanPipeline"},
        {"request_batch_max_wait_ms": 0},
        {"engine_args": {"cache_backend": "tea_cache"}},
        {"default_sampling_params": {"num_inference_steps": 50}},
        {"execution_type": "DIFFUSION"},
    ],
    ids=lambda second: next(iter(second)),
)
def test_a_diffusion_stage_without_a_type_is_found_by_what_it_has(second: dict[str, Any]) -> None:
    speaks = {"stage_id": 0, "max_num_seqs": 64, "default_sampling_params": {"top_k": 1}}
    stages = [speaks, {"stage_id": 1, "max_num_seqs": 2, **second}]

    assert parse_deploy({"stages": stages}, "deploy").settings["max_num_seqs"] == 2


@pytest.mark.parametrize("names", [("glm_image",), ("mine", "glm_image")])
def test_a_diffusion_stage_is_found_by_the_name_of_the_pipeline_or_file(
    names: tuple[str, ...],
) -> None:
    stages = [{"stage_id": 0, "max_num_seqs": 64}, {"stage_id": 1, "max_num_seqs": 2}]

    assert parse_deploy({"stages": stages}, "deploy", names).settings["max_num_seqs"] == 2
    named = {"pipeline": "glm_image", "stages": stages}
    assert parse_deploy(named, "deploy").settings["max_num_seqs"] == 2


def test_a_file_overlays_its_base_stage_by_stage(tmp_path: Path) -> None:
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("""
dtype: half
stages:
  - {stage_id: 0, stage_type: llm}
  - {stage_id: 1, stage_type: diffusion, max_num_seqs: 4, default_sampling_params: {seed: 1}}
""")
    over.write_text("""
base_config: base.yaml
stages:
  - {stage_id: 1, max_num_seqs: 2, default_sampling_params: {guidance_scale: 2.0}}
""")

    assert load_deploy(over).settings == {
        "dtype": "float16",
        "batching_mode": "request",
        "max_num_seqs": 2,
        "default_sampling_params": '{"seed": 1, "guidance_scale": 2.0}',
    }


def test_a_base_that_is_absent_or_in_a_circle_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    for base, says in [("absent.yaml", "absent.yaml cannot be read"), ("deploy.yaml", "too many")]:
        file.write_text(f"base_config: {base}")
        with pytest.raises(SettingRejected, match=says):
            load_deploy(file)


def test_keys_that_nobody_knows_are_passed_over_and_named() -> None:
    data = {
        "forced_aligner": {"model": "m"},
        "stages": [{"enable_cache_dit_summary": False, "hf_overrides": {}, "max_num_seqs": 2}],
    }

    asked = parse_deploy(data, "deploy")

    assert asked.settings["max_num_seqs"] == 2
    assert asked.unused == (
        "forced_aligner", "stages[0].enable_cache_dit_summary", "stages[0].hf_overrides"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "deploy is None: must be a mapping"),
        ({1: 2}, "deploy: key 1: must be text"),
        ({}, "deploy has neither stages nor stage_args: write stages"),
        ({"stages": [{}], "stage_args": [{}]}, "deploy has both stages and stage_args"),
        ({"stages": []}, "deploy: stages must be a list with at least one entry"),
        ({"stages": ["a"]}, "deploy: stages[0] is 'a': must be a mapping"),
        ({"stage_arg": [{}]}, "deploy: unknown key 'stage_arg'; did you mean 'stage_args'?"),
        (
            {"max_num_seqs": 4, "stages": [{}]},
            "deploy: unknown key 'max_num_seqs': it belongs into an entry of stages",
        ),
        (
            {"stages": [{"max_num_seq": 4}]},
            "deploy: stages[0]: unknown key 'max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        (
            {"stages": [{"engine_args": {"max_nun_seqs": 4}}]},
            "deploy: stages[0]: unknown key 'max_nun_seqs'; did you mean 'max_num_seqs'?",
        ),
        ({"stages": [{"engine_args": 4}]}, "deploy: stages[0].engine_args is 4: must be a mapping"),
        (
            {"stages": [{"max_num_seqs": 4, "engine_args": {"max_num_seqs": 2}}]},
            "deploy: stages[0]: max_num_seqs is 4 and 2: give it once",
        ),
        ({"stages": [{}, {}]}, "deploy: 2 of the 2 entries of stages can be the diffusion stage"),
        ({"stages": [{"stage_type": "llm"}]}, "deploy: 0 of the 1 entries of stages can be"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_to_change(data: Any, says: str) -> None:
    with pytest.raises(SettingRejected) as refused:
        parse_deploy(data, "deploy")

    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("max_num_seqs", 0, "a whole number of at least 1"),
        ("max_num_seqs", "4", "a whole number of at least 1"),
        ("max_num_seqs", 2.0, "a whole number of at least 1"),
        ("max_num_seqs", True, "a whole number of at least 1"),
        ("request_batch_max_wait_ms", -1, "a number of milliseconds, at least 0"),
        ("request_batch_max_wait_ms", float("inf"), "a number of milliseconds, at least 0"),
        ("request_batch_max_wait_ms", float("nan"), "a number of milliseconds, at least 0"),
        ("step_execution", "yes", "true or false"),
        ("dtype", "int8", "one of auto, float32, bfloat16, float16, half, float"),
        ("dtype", ["half"], "one of auto, float32, bfloat16, float16, half, float"),
        ("model", "", "text, not empty"),
    ],
)
def test_a_value_that_is_wrong_is_refused_with_its_rule(key: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingRejected) as refused:
        deploy(**{key: value})

    assert str(refused.value) == f"deploy: {key} {value!r}: must be {rule}"
    assert refused.value.param == key


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("stages: [")

    for file in (broken, tmp_path / "absent.yaml"):
        with pytest.raises(SettingRejected) as refused:
            load_deploy(file)
        assert str(refused.value).startswith(f"deploy config {file} cannot be read: ")
