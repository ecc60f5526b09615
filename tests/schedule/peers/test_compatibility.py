"""Batching config, costs, signatures: one example for each rule, one property for each promise."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import SettingRejected
from carpool.schedule.peers.compatibility import (
    cost,
    request_key,
    resolution,
    signature,
    signature_difference,
)
from carpool.settings.peers.sglang_rules import (
    BatchingRule,
    Caps,
    Resolution,
    Server,
    caps,
    load_rules,
    parse_rules,
)
from carpool.types import CheckedRequest

SERVER = Server("Qwen/Qwen-Image", device_memory_gib=79.2, is_offloaded=False)
CAP = {"model": "m", "max_batch_size": 4}


def parsed(**fields: Any) -> BatchingRule:
    [rule] = parse_rules([{"model": "m", "max_batch_size": 4} | fields], "config")
    return rule


def job(seed: int = 1, lora: Sequence[tuple[str, float]] = (), **arguments: Any) -> CheckedRequest:
    task = "image-to-image" if "image" in arguments else "text-to-image"
    arguments = {"prompt": f"prompt {seed}", **arguments}
    return CheckedRequest(f"req-{seed}", seed, arguments, task=task, lora=tuple(lora))


def difference(left: CheckedRequest, right: CheckedRequest, **defaults: Any) -> str | None:
    return signature_difference(signature(left, defaults), signature(right, defaults))


# The file


def test_all_three_forms_say_the_same() -> None:
    rule = {"max_batch_size": 2, "max_cost": 9000}
    listed = rule | {"model": "Qwen/Qwen-Image", "resolution": "1024x768"}

    versioned = parse_rules({"schema_version": 1, "rules": [listed]}, "config")

    assert versioned == parse_rules([listed], "config")
    assert versioned == parse_rules({"Qwen/Qwen-Image|1024x768": rule}, "config")
    assert versioned == parse_rules({"schema_version": None, "rules": [listed]}, "config")
    assert versioned == (
        BatchingRule(
            max_batch_size=2, max_cost=9000, model="Qwen/Qwen-Image", resolution=(1024, 768)
        ),
    )


def test_a_mappings_key_fills_only_what_its_rule_leaves_out() -> None:
    data = {
        "schema_version": 1,
        "a|512x512": {"max_batch_size": 2, "model": "b", "resolution": "*"},
        "c": {"max_batch_size": 3},
        "|64x64": {"max_batch_size": 4, "model_contains": "d"},
    }

    assert parse_rules(data, "config") == (
        BatchingRule(max_batch_size=2, model="b"),
        BatchingRule(max_batch_size=3, model="c"),
        BatchingRule(max_batch_size=4, model_contains="d", resolution=(64, 64)),
    )


def test_a_rule_may_say_where_its_numbers_come_from() -> None:
    assert parsed(calibration={"tool": "nsys", "runs": [1, 2]}) == parsed()


@pytest.mark.parametrize("is_on", [True, 1, "1", "true", "YES", "y", " On "])
def test_offload_is_said_in_many_ways(is_on: Any) -> None:
    assert parsed(offload=is_on).offload is True
    assert parsed(offload="off").offload is False
    assert parsed(offload=None).offload is None


@pytest.mark.parametrize(
    ("data", "key", "says"),
    [
        ({"schema_version": 2, "rules": [CAP]}, "schema_version", "2: must be 1"),
        ({"schema_version": True, "rules": [CAP]}, "schema_version", "True: must be 1"),
        ({"rule": [CAP]}, "rule", "is a list: must be an object, a rule; did you mean 'rules'?"),
        ({"rules": {"m": CAP}}, "rules", "is an object: must be a list of rules"),
        (
            {"schema_verison": 1, "rules": [CAP]}, "schema_verison",
            "is not a key of a batching config; did you mean 'schema_version'?",
        ),
        (
            [CAP | {"max_batchsize": 4}], "max_batchsize",
            "rule 1: max_batchsize is not a key of a rule; did you mean 'max_batch_size'?",
        ),
        ([CAP, {"model": "m"}], "max_batch_size", "rule 2: max_batch_size is missing"),
        ({"m|8x8": {}}, "max_batch_size", "rule 'm|8x8': max_batch_size is missing"),
        ([{"max_batch_size": 1}], "model", "is missing: a rule needs it or model_contains"),
        ([CAP | {"model_contains": "n"}], "model_contains", "a rule takes one of them"),
        ([CAP | {"model": ""}], "model", "'': must be text, not empty"),
        ([CAP | {"max_batch_size": 0}], "max_batch_size", "0: must be a whole number of at least"),
        ([CAP | {"max_batch_size": True}], "max_batch_size", "True: must be a whole number"),
        ([CAP | {"max_batch_size": "four"}], "max_batch_size", "'four': must be a whole number"),
        ([CAP | {"max_cost": 0}], "max_cost", "0: must be a number above 0"),
        ([CAP | {"max_cost": float("nan")}], "max_cost", "nan: must be a number above 0"),
        ([CAP | {"resolution": "1024"}], "resolution", "'1024': must be WIDTHxHEIGHT"),
        ([CAP | {"offload": "maybe"}], "offload", "'maybe': must be true or false"),
        ([CAP | {"device_memory_gb_min": -1}], "device_memory_gb_min", "-1: must be a number of"),
        (
            [CAP | {"device_memory_gb_min": 80, "device_memory_gb_max": 48}],
            "device_memory_gb_min", "80: must be at most device_memory_gb_max, 48",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_key_and_the_rule(data: Any, key: str, says: str) -> None:
    with pytest.raises(SettingRejected) as refused:
        parse_rules(data, "config")

    assert refused.value.param == key
    assert str(refused.value).startswith("config: ")
    assert key in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "config has no rules: leave it out, or write one"),
        ({"schema_version": 1}, "config has no rules"),
        ({"rules": []}, "config has no rules"),
        ("rules", "config is text: must be {'schema_version': 1, 'rules': [...]}, a list"),
        (None, "config is null: must be"),
        ([4], "config: rule 1 is a number: must be an object"),
    ],
)
def test_an_error_says_what_was_found_instead(data: Any, says: str) -> None:
    with pytest.raises(SettingRejected) as refused:
        parse_rules(data, "config")

    assert str(refused.value).startswith(says)


def test_a_file_is_read_once_and_named_in_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"schema_version": 1, "rules": [CAP]}))

    assert load_rules(file) == (BatchingRule(max_batch_size=4, model="m"),)

    for text, says in {
        "{": "cannot be read: Expecting",
        '{"m": {"model": "a", "model": "b"}}': "'model' stands twice in one object",
        "[]": "has no rules",
    }.items():
        file.write_text(text)
        with pytest.raises(SettingRejected, match=says) as refused:
            load_rules(file)
        assert str(refused.value).startswith(f"batching config {file}")
    with pytest.raises(SettingRejected, match=r"cannot be read: .*No such file"):
        load_rules(tmp_path / "absent.json")


# Caps


@pytest.mark.parametrize(
    ("fields", "does_match"),
    [
        ({"model": "Qwen/Qwen-Image"}, True), ({"model": "Qwen-Image"}, False),
        ({"model_contains": "Qwen-Image"}, True), ({"model_contains": "qwen"}, False),
        ({"resolution": (1024, 768)}, True), ({"resolution": (768, 1024)}, False),
        ({"device_memory_gb_min": 79.2, "device_memory_gb_max": 79.2}, True),
        ({"device_memory_gb_min": 80}, False), ({"device_memory_gb_max": 79}, False),
        ({"offload": False}, True), ({"offload": True}, False),
    ],
)  # fmt: skip
def test_a_rule_applies_where_all_it_says_is_so(fields: dict[str, Any], does_match: bool) -> None:
    rule = BatchingRule(max_batch_size=2, max_cost=7.0, **fields)

    found = caps([rule], SERVER, (1024, 768), user_max=8)

    assert found == (Caps(2, 7.0) if does_match else Caps(8, None))


def test_a_size_that_is_not_known_matches_rules_for_any_size_only() -> None:
    rules = parse_rules([CAP | {"resolution": "8x8", "max_batch_size": 1}, CAP], "config")

    assert caps(rules, Server("m", None, False), None, user_max=8) == Caps(4)


def test_memory_that_cannot_be_read_keeps_no_rule_from_applying() -> None:
    rule = BatchingRule(max_batch_size=2, device_memory_gb_min=500)

    assert caps([rule], Server("m", None, False), None, user_max=8) == Caps(2)


RULES = st.builds(
    BatchingRule, max_batch_size=st.integers(1, 12), max_cost=st.none() | st.floats(1, 1e6),
    model=st.none() | st.sampled_from(["Qwen/Qwen-Image", "other"]),
    model_contains=st.none() | st.sampled_from(["Qwen", "other"]),
    resolution=st.none() | st.sampled_from([(64, 64), (128, 64)]),
    device_memory_gb_min=st.none() | st.floats(0, 200),
    device_memory_gb_max=st.none() | st.floats(0, 200), offload=st.none() | st.booleans(),
)  # fmt: skip
SIZES = st.none() | st.sampled_from([(64, 64), (128, 64)])


@given(st.lists(RULES, max_size=5), RULES, SIZES, st.integers(1, 12))
def test_one_more_rule_only_tightens(
    rules: list[BatchingRule], more: BatchingRule, size: Resolution | None, user_max: int
) -> None:
    before = caps(rules, SERVER, size, user_max)
    after = caps([*rules, more], SERVER, size, user_max)

    assert 1 <= after.outputs <= before.outputs <= user_max
    assert before.cost is None or (after.cost is not None and after.cost <= before.cost)


@given(st.lists(RULES, max_size=5), SIZES, st.randoms())
def test_the_order_of_rules_does_not_matter(
    rules: list[BatchingRule], size: Resolution | None, rng: Any
) -> None:
    shuffled = rng.sample(rules, len(rules))

    assert caps(shuffled, SERVER, size, 8) == caps(rules, SERVER, size, 8)


# Costs


def test_a_request_costs_its_latent_places_times_frames_times_outputs() -> None:
    assert cost((1024, 768), vae_scale_px=8) == 128 * 96
    assert cost((1024, 768), frames=81, outputs=2, vae_scale_px=8) == 128 * 96 * 81 * 2
    assert cost((1020, 9), vae_scale_px=16) == 64 * 1
    assert cost(None, vae_scale_px=8) == 0


def test_a_size_is_what_the_request_says_or_the_models_default() -> None:
    assert resolution({"width": 512}, (1024, 768)) == (512, 768)
    assert resolution({"width": 512, "height": None}, None) is None
    assert resolution({}, (64, 64)) == (64, 64)


# Signatures


def test_prompt_and_seed_may_differ_in_a_dynamic_batch() -> None:
    left = job(1, prompt="a fox", prompt_2="oil", width=512, num_inference_steps=20)
    right = job(2, prompt="a hare", width=512, num_inference_steps=20)

    assert difference(left, right) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"height": 8, "width": 8, "guidance_scale": 2.0}, "sampling_params.height"),
        ({"width": 8, "num_inference_steps": 3}, "sampling_params.width"),
        ({"negative_prompt": "blurry", "width": 8}, "sampling_params.negative_prompt"),
        ({"frame_rate": 24, "guidance_scale": 2.0}, "sampling_params.fps"),
        ({"sigmas": [1.0, 0.5], "eta": 0.1}, "extra.diffusers_kwargs"),
        ({"sigmas": [1.0, 0.5], "flow_shift": 3.0}, "sampling_params.flow_shift"),
        ({"lora": [("ink", 1.0)]}, "sampling_params.lora"),
        ({"image": object()}, "image_conditioning"),
    ],
)
def test_the_first_field_that_differs_is_the_reject_reason(
    arguments: dict[str, Any], reason: str
) -> None:
    plain = job(1, width=512, height=512)
    other = job(2, **({"width": 512, "height": 512} | arguments))

    assert difference(plain, other) == reason
    assert difference(other, plain) == reason


def test_the_task_comes_before_everything_and_the_number_of_outputs_counts() -> None:
    pictures = signature(job(1, width=64), {})

    assert signature_difference(
        pictures, {**pictures, "task_type": "text-to-video", "width": 8}
    ) == ("sampling_params.task_type")
    assert signature_difference(
        pictures, signature(dataclasses.replace(job(2, width=64), group_size=2), {})
    ) == ("sampling_params.num_outputs_per_prompt")


def test_a_request_with_a_picture_does_not_even_share_with_its_like() -> None:
    painting = job(1, image=object())

    assert difference(painting, painting) == "image_conditioning"


def test_left_out_is_the_same_as_said_with_the_default() -> None:
    said, silent = job(1, guidance_scale=3.5, eta=None), job(2)

    assert difference(said, silent, guidance_scale=3.5) is None
    assert difference(said, silent, guidance_scale=4.0) == "sampling_params.guidance_scale"
    assert request_key(said, {"guidance_scale": 3.5}) == request_key(
        silent, {"guidance_scale": 3.5}
    )


def test_lists_and_mappings_are_compared_by_content_and_objects_by_identity() -> None:
    latents, others = object(), object()
    plain: dict[str, Any] = {"sigmas": [1.0, [0.5]], "attention_kwargs": {"a": 1, "b": {"c": 2}}}

    again: dict[str, Any] = {"sigmas": (1.0, (0.5,)), "attention_kwargs": {"b": {"c": 2}, "a": 1}}
    assert difference(job(1, **plain), job(2, **again)) is None
    assert difference(job(1, x=latents), job(2, x=latents)) is None
    assert difference(job(1, x=latents), job(2, x=others)) == "extra.diffusers_kwargs"
    assert difference(job(1, x=latents), job(2, x=1)) == "extra.diffusers_kwargs"
    assert hash(request_key(job(1, x=latents), {})) == hash(request_key(job(2, x=latents), {}))


def test_in_a_wave_prompts_pictures_and_latents_may_differ_but_not_whether_they_are_there() -> None:
    def key(**arguments: Any) -> Any:
        return request_key(job(**arguments), {})

    for name in ("prompt", "prompt_2", "negative_prompt", "image", "latents"):
        assert key(**{name: object()}) == key(seed=2, **{name: object()}), name
    assert key(image=object()) != key()
    assert key(prompt_embeds=object()) != key()


def test_in_a_wave_negative_prompts_count_only_as_far_as_one_is_used() -> None:
    """As vLLM-Omni: guidance above 1 and a negative prompt that is not empty switch it on."""

    def key(scale: float, **arguments: Any) -> Any:
        return request_key(job(guidance_scale=scale, **arguments), {})

    assert key(4.0) == key(4.0, negative_prompt="") == key(4.0, negative_prompt=None)
    assert key(4.0, negative_prompt="a") == key(4.0, negative_prompt="b")
    assert key(4.0, negative_prompt="a") != key(4.0, negative_prompt="")
    assert key(1.0, negative_prompt="a") == key(1.0, negative_prompt="")


def test_in_a_wave_all_have_as_many_outputs() -> None:
    one, two = job(1), dataclasses.replace(job(2), group="req-2", group_size=2)

    assert request_key(one, {}) != request_key(two, {})


def test_a_wave_keeps_apart_what_else_differs() -> None:
    keys = [
        request_key(one, {})
        for one in (
            job(),
            job(width=8),
            job(width=9),
            job(num_inference_steps=4),
            job(sigmas=[0.5]),
            job(extra={"a": 1}),
            job(lora=[("ink", 1.0)]),
            job(lora=[("ink", 0.5)]),
            CheckedRequest("req", 1, {"prompt": "p"}, task="text-to-video"),
        )
    ]

    assert len(set(keys)) == len(keys)
    assert request_key(job(lora=[("ink", 0.5004)]), {}) not in keys


def test_numbers_of_rules_may_be_text_and_rules_may_have_comments() -> None:
    plain = {"model": "m", "max_batch_size": 4, "max_cost": 9.5}
    as_text = {"model": "m", "max_batch_size": "4", "max_cost": "9.5", "comment": "measured"}

    assert parse_rules([as_text], "config") == parse_rules([plain], "config")
    above = {"comment": "for the H100s", "rules": [plain]}
    assert parse_rules(above, "config") == parse_rules([plain], "config")
    keyed = {"comment": "for the H100s", "m": {"max_batch_size": 4, "max_cost": 9.5}}
    assert parse_rules(keyed, "config") == parse_rules([plain], "config")


@pytest.mark.parametrize("cost", ["NaN", "Infinity", '"nan"', '"many"', "-1"])
def test_a_rule_that_would_switch_its_cap_off_is_refused(cost: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(f'[{{"model": "m", "max_batch_size": 2, "max_cost": {cost}}}]')

    with pytest.raises(SettingRejected, match=r"max_cost .*: must be a number above 0"):
        load_rules(file)


def test_a_key_that_stands_twice_in_a_rule_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text('[{"model": "m", "max_batch_size": 2, "max_batch_size": 3}]')

    with pytest.raises(SettingRejected, match="'max_batch_size' stands twice in one object"):
        load_rules(file)
