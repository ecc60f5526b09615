"""What a request may say: every refusal names what was seen, the rule, and what would do."""

import math
import re
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool import errors
from carpool.request.card import Card, Parameter, Task
from carpool.request.own_values import seeds
from carpool.request.parameters import check
from carpool.request.rules import MOST_TEXT, MOST_TEXTS
from carpool.request.values import ParameterKind
from carpool.types import MAX_SEED, Request


def card_of(
    pipeline: str, *parameters: Parameter, name: str = "text-to-image", **fields: Any
) -> Card:
    """The card of a pipeline with one task."""
    task = Task(name=name, pipeline=pipeline, parameters=parameters)
    return Card(id="test", tasks=(task,), **{"defaults": {}, **fields})


CARD = card_of(
    "TestPipeline",
    Parameter("prompt", "str"), Parameter("image", "other"), Parameter("negative_prompt", "str"),
    Parameter("width", "int"), Parameter("height", "int"),
    Parameter("num_inference_steps", "int", default=28),
    Parameter("guidance_scale", "float", default=3.5), Parameter("strength", "float", default=0.6),
    Parameter("sigmas", "numbers"), Parameter("guidance_rescale", "float"),
    Parameter("use_karras", "bool"), Parameter("max_sequence_length", "int", default=512),
    Parameter("num_images_per_prompt", "int", default=1), Parameter("generator", "other"),
    Parameter("output_type", "str", default="pil"), Parameter("return_dict", "bool", default=True),
    Parameter("prompt_embeds", "other"),
    defaults={"num_inference_steps": 20, "guidance_scale": 4.0}, size_multiple_px=16,
    default_size_px=(64, 64), max_pixels=128 * 128, max_steps=100, name="image-to-image",
)  # fmt: skip
BARE = card_of(
    "BarePipeline", Parameter("width", "int"), Parameter("label", "int", required=True),
    size_multiple_px=8, default_size_px=None, max_pixels=64, max_steps=10,
)  # fmt: skip

STEPS = "must be a whole number from 1 to 100"
WHOLE = "must be a whole number, at most 2**63 - 1"
SEED = "must be a whole number from 0 to 2**63 - 1"
FINITE = "must be a finite number of at most 3.4e38"
SECONDS = "must be a number of seconds above 0, at most 3.4e38"
PIXELS = "pixels, the limit is 16384; the nearest size of this shape is"
MULTIPLE = "both sides must be multiples of 16, above 0; the nearest size is"


def refusal(
    prompt: Any = "a cat", *, from_json: bool = False, **parameters: Any
) -> errors.Rejected:
    with pytest.raises(errors.Rejected) as refused:
        check(CARD, Request(prompt, **parameters), from_json=from_json)
    return refused.value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_inference_steps": 0}, f"num_inference_steps=0: {STEPS}"),
        ({"num_inference_steps": 2.5}, f"num_inference_steps=2.5: {WHOLE}"),
        ({"max_sequence_length": 2**63}, f"max_sequence_length={2**63}: {WHOLE}"),
        ({"max_sequence_length": 0}, "max_sequence_length=0: must be at least 1"),
        ({"guidance_scale": math.nan}, f"guidance_scale=NaN: {FINITE}"),
        ({"strength": 1.5}, "strength=1.5: must be from 0 to 1"),
        ({"strength": -0.1}, "strength=-0.1: must be from 0 to 1"),
        ({"sigmas": [1, math.nan]}, "sigmas=[1, NaN]: must be a list of finite numbers"),
        ({"use_karras": 1}, "use_karras=1: must be true or false"),
        ({"negative_prompt": ["bad"]}, 'negative_prompt=["bad"]: must be one string of valid'),
        ({"output_type": "png"}, 'output_type="png": must be one of pil, np, pt, latent'),
        ({"seed": -1}, f"seed=-1: {SEED}"),
        ({"seed": 2**63}, f"seed={2**63}: {SEED}"),
        ({"timeout_s": 0}, f"timeout_s=0: {SECONDS}"),
        ({"timeout_s": 3.5e38}, f"timeout_s=3.5e+38: {SECONDS}"),
        ({"timeout_s": math.inf}, f"timeout_s=Infinity: {SECONDS}"),
        ({"prompt": 5}, "prompt=5: must be one string of valid Unicode"),
        ({"prompt": b"a cat"}, "prompt is a list of 5: send one request for each prompt"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_impossible_values_are_refused(given: dict[str, Any], says: str) -> None:
    refused = refusal(**{"prompt": "a cat", **given})

    assert str(refused).startswith(says)
    assert type(refused) is errors.InvalidValue
    told = refused.status, refused.code, refused.param
    assert told == (400, "invalid_value", next(iter(given)))


@pytest.mark.parametrize(
    ("width", "height", "says"),
    [
        (0, 64, f"size 0x64 is not supported: {MULTIPLE} 16x64"),
        (64, 0, f"size 64x0 is not supported: {MULTIPLE} 64x16"),
        (-8, 64, f"size -8x64 is not supported: {MULTIPLE} 16x64"),
        (70, 41, f"size 70x41 is not supported: {MULTIPLE} 64x48"),
        (70, None, f"size 70x64 is not supported: {MULTIPLE} 64x64"),
        (None, 4, f"size 64x4 is not supported: {MULTIPLE} 64x16"),
        (256, 128, f"size 256x128 is not supported: it has 32768 {PIXELS} 176x80"),
        (16, 4096, f"size 16x4096 is not supported: it has 65536 {PIXELS} 16x1024"),
        (2**62, 2**62, f"size {2**62}x{2**62} is not supported: it has {2**124} pixels, the limit"),
    ],
)
def test_impossible_sizes_are_refused_with_the_nearest(
    width: int | None, height: int | None, says: str
) -> None:
    refused = refusal(width=width, height=height)

    assert str(refused).startswith(says)
    assert type(refused) is errors.SizeRejected
    assert (refused.code, refused.param) == ("size_not_supported", "size")


def test_the_nearest_size_is_accepted() -> None:
    for width, height in ((64, 48), (16, 16), (128, 128)):
        assert check(CARD, Request("a cat", width=width, height=height))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    refused = refusal(guidance=3)

    told = "TestPipeline has no parameter 'guidance'; did you mean 'guidance_scale'?"
    assert str(refused) == told
    assert type(refused) is errors.UnknownParameter
    assert refused.param == "guidance"
    assert str(refusal(zzz=3)) == "TestPipeline has no parameter 'zzz'"
    assert str(refusal(generators=3)) == "TestPipeline has no parameter 'generators'"  # refused too


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("generator", "pass seed, every request gets a generator of its own"),
        ("num_images_per_prompt", "pass n"),
        ("num_videos_per_prompt", "pass n"),
    ],
)
def test_what_is_ours_to_set_is_not_taken(name: str, says: str) -> None:
    said: dict[str, Any] = {name: 2}

    refused = refusal(**said)

    assert str(refused) == f"{name} is not taken: {says}"
    assert (type(refused), refused.code) == (errors.UnsupportedParameter, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"), [("generator", None), ("num_images_per_prompt", 1), ("return_dict", False)]
)
def test_what_changes_nothing_may_be_said(name: str, value: Any) -> None:
    assert name not in check(CARD, Request("a cat", **{name: value})).arguments


def test_a_list_of_prompts_is_several_requests() -> None:
    refused = refusal(["a cat", "a dog"])

    assert str(refused) == (
        "prompt is a list of 2: send one request for each prompt (in Python, generate([...]) does)"
    )


def test_every_request_needs_a_prompt() -> None:
    refused = refusal(None)

    assert str(refused) == "prompt is missing: every request needs one"
    assert type(refused) is errors.MissingParameter
    assert refused.param == "prompt"
    assert check(CARD, Request("")).arguments["prompt"] == ""
    assert check(CARD, Request(prompt_embeds=object())).arguments["prompt_embeds"]


def test_what_a_pipeline_requires_must_be_said() -> None:
    with pytest.raises(errors.MissingParameter, match="label is missing"):
        check(BARE, Request())
    with pytest.raises(errors.UnknownParameter, match="BarePipeline has no parameter 'prompt'"):
        check(BARE, Request("a cat", label=1))
    assert check(BARE, Request(label=1)).arguments == {"label": 1}


def test_what_json_has_no_use_for_is_not_suggested() -> None:
    assert str(refusal(output_typ=1)).endswith("did you mean 'output_type'?")
    assert "output_type" not in str(refusal(output_typ=1, from_json=True))


def strong(rounds: Literal["up", "down"], strength: float, steps: int) -> errors.Rejected | None:
    """What is wrong with a strength, where a pipeline counts its steps in this way."""
    card = replace(CARD, tasks=(replace(CARD.tasks[0], strength_rounds=rounds),))
    try:
        check(card, Request("a cat", strength=strength, num_inference_steps=steps))
    except errors.Rejected as refused:
        return refused
    return None


@pytest.mark.parametrize(
    ("rounds", "strength", "says"),
    [
        ("up", 0.0, "strength=0.0: leaves none of 4 steps, must be above 0, such as 0.25"),
        ("up", -0.0, "strength=-0.0: leaves none of 4 steps, must be above 0, such as 0.25"),
        ("up", 1e-30, "strength=1e-30: leaves none of 4 steps, must be above 0, such as 0.25"),
        ("up", 0.1, None),
        ("down", 0.0, "strength=0.0: leaves none of 4 steps, must be at least 0.25"),
        ("down", 0.24, "strength=0.24: leaves none of 4 steps, must be at least 0.25"),
        ("down", 0.25, None),
    ],
)
def test_a_strength_that_leaves_no_step_is_refused_with_one_that_works(
    rounds: Literal["up", "down"], strength: float, says: str | None
) -> None:
    refused = strong(rounds, strength, 4)

    assert (str(refused), refused and refused.param) == (str(says), says and "strength")


def test_the_strength_that_is_named_works() -> None:
    for rounds in ("up", "down"):
        for steps in range(1, CARD.max_steps + 1):
            least = re.findall(r"[0-9.]+$", str(strong(rounds, 0, steps)))
            assert strong(rounds, float(least[0]), steps) is None


def test_the_models_own_strength_for_pictures_and_the_steps_of_sigmas_count_too() -> None:
    card = replace(CARD, tasks=(replace(CARD.tasks[0], strength_rounds="down"),))

    check(card, Request("a cat", num_inference_steps=1))
    with pytest.raises(errors.InvalidValue, match=r"strength=0.6: leaves none of 1 steps"):
        check(card, Request("a cat", image=Image.new("RGB", (64, 64)), num_inference_steps=1))
    with pytest.raises(errors.InvalidValue, match=r"strength=0.3: leaves none of 2 steps"):
        check(card, Request("a cat", sigmas=[1.0, 0.5], strength=0.3))


def test_a_strength_counts_for_nothing_where_a_refiner_is_told_where_to_start() -> None:
    start = Parameter("denoising_start", "float")
    mine = replace(CARD.tasks[0], strength_rounds="down")
    card = replace(CARD, tasks=(replace(mine, parameters=(*mine.parameters, start)),))

    common: dict[str, Any] = {"image": Image.new("RGB", (64, 64)), "num_inference_steps": 1}
    check(card, Request("a cat", denoising_start=0.5, **common))
    with pytest.raises(errors.InvalidValue, match="leaves none of 1 steps"):
        check(card, Request("a cat", denoising_start=None, **common))


def test_a_card_knows_its_size_from_the_model_its_defaults_or_its_pipeline() -> None:
    sided = replace(
        BARE.tasks[0],
        parameters=(Parameter("width", "int", default=32), Parameter("height", "int", default=16)),
    )

    assert CARD.usual_size_px == (64, 64)
    assert BARE.usual_size_px is None
    assert replace(BARE, tasks=(sided,)).usual_size_px == (32, 16)
    assert replace(BARE, tasks=(sided,), defaults={"width": 8}).usual_size_px == (8, 16)


def test_json_carries_no_objects_and_no_output_type() -> None:
    refused = refusal(image="https://example.org/cat.png", from_json=True)

    assert str(refused) == "image cannot be sent as JSON"
    assert type(refused) is errors.UnsupportedParameter
    taken = str(refusal(output_type="pil", from_json=True))
    assert taken == "output_type is not taken: use output_format"
    picture = np.zeros((1, 64, 64, 3))
    assert check(CARD, Request("a cat", image=picture)).arguments["image"] is picture


def test_none_leaves_a_parameter_out_unless_the_pipelines_own_default_differs() -> None:
    said: dict[str, Any] = {"num_inference_steps": None, "negative_prompt": None, "width": None}
    left = {"prompt": "a cat", "num_inference_steps": None, "guidance_scale": 4.0}

    assert check(CARD, Request("a cat", **said)).arguments == left


def test_none_does_not_hide_a_servers_default() -> None:
    card = replace(CARD, defaults={"width": 32, "height": 32, "negative_prompt": "blurry"})
    said: dict[str, Any] = dict.fromkeys(card.defaults)

    assert check(card, Request("a cat", **said)).arguments == {"prompt": "a cat", **card.defaults}


def test_none_is_passed_on_where_the_default_is_another_value_that_is_not_plain() -> None:
    [task] = CARD.tasks
    listed = Parameter("instruction", "list", default_is_none=False)
    card = replace(CARD, tasks=(replace(task, parameters=(*task.parameters, listed)),))

    assert check(card, Request("a cat", instruction=None)).arguments["instruction"] is None


def test_defaults_of_the_model_lie_beneath_what_is_said() -> None:
    job = check(CARD, Request("a cat", seed=5, guidance_scale=7))

    assert job.arguments == {"prompt": "a cat", "num_inference_steps": 20, "guidance_scale": 7.0}
    assert isinstance(job.arguments["guidance_scale"], float)
    assert (job.seed, job.timeout_s) == (5, None)
    assert CARD.defaults == {"num_inference_steps": 20, "guidance_scale": 4.0}


def test_a_job_is_of_its_request() -> None:
    request = Request("a cat", timeout_s=3, request_id="mine")

    job = check(CARD, request)

    assert (job.request_id, job.timeout_s) == ("mine", 3.0)
    assert 0 <= job.seed < 2**32
    assert check(CARD, Request("a cat")).request_id.startswith("req-")


def test_a_card_counts_the_steps_that_arguments_ask_for() -> None:
    assert CARD.steps({"num_inference_steps": 5}) == 5
    assert CARD.steps({}) == 28  # the pipeline's own default
    assert BARE.steps({}) == 0


def test_seeds_follow_each_other_and_start_again_after_the_last() -> None:
    assert seeds(5, 3) == [5, 6, 7]
    assert seeds(MAX_SEED - 1, 3) == [MAX_SEED - 1, MAX_SEED, 0]
    assert len(set(seeds(None, 5))) == 5
    with pytest.raises(errors.InvalidValue, match=r"seed=-1: must be a whole number"):
        seeds(-1, 2)


def test_a_side_whose_other_the_pipeline_chooses_is_checked_alone_by_the_largest_square() -> None:
    with pytest.raises(
        errors.SizeRejected, match=r"size 0 is not supported: .* the nearest size is 8$"
    ):
        check(BARE, Request(label=1, width=0))
    assert check(BARE, Request(label=1, width=8)).arguments["width"] == 8
    with pytest.raises(
        errors.SizeRejected, match=r"width=512: must be at most 8; say width and height"
    ):
        check(BARE, Request(label=1, width=512))


STAGES = card_of(
    "StagesPipeline",
    Parameter("prompt", "str"), Parameter("num_inference_steps", "int", default=10),
    Parameter("prior_num_inference_steps", "float", default=60, also=("dict",)),
    Parameter("pyramid_num_inference_steps_list", "numbers"),
    Parameter("max_area", "int", default=32 * 32), Parameter("upsampling_width", "int"),
    Parameter("max_sequence_length", "int", default=6000),
    Parameter("prompt_max_new_tokens", "int"),
    size_multiple_px=8, default_size_px=(32, 32), max_pixels=64 * 64, max_steps=100,
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prior_num_inference_steps": 101}, f"=101.0: {STEPS}"),
        ({"prior_num_inference_steps": 0}, f"=0.0: {STEPS}"),
        ({"prior_num_inference_steps": {"0.5": 80, "0": 21}}, "above 0, 100 in all"),
        ({"prior_num_inference_steps": {"0.5": "80"}}, "must have whole numbers above 0"),
        ({"pyramid_num_inference_steps_list": [1, 100]}, "above 0, 100 in all"),
        ({"pyramid_num_inference_steps_list": []}, "=[]: must have whole numbers"),
        ({"max_area": 64 * 64 + 1}, "=4097: must be from 64 to 4096, in pixels"),
        ({"max_area": 0}, "=0: must be from 64 to 4096, in pixels"),
        ({"upsampling_width": 65}, "=65: must be at most 64"),
        ({"max_sequence_length": 6001}, "=6001: must be at most 6000"),  # the pipeline's own
        ({"prompt_max_new_tokens": 10**9}, "=1000000000: must be at most 4096"),
        ({"prompt_max_new_tokens": 0}, "=0: must be at least 1"),
    ],
)
def test_no_name_is_a_way_past_the_limits_of_steps_pixels_and_tokens(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(errors.Rejected) as refused:
        check(STAGES, Request("a cat", **given))

    [name] = given
    assert refused.value.param == name
    assert str(refused.value).startswith(f"{name}=")
    assert says in str(refused.value)


def test_the_most_that_the_limits_let_through_is_taken() -> None:
    most: dict[str, Any] = {
        "prior_num_inference_steps": {"0.5": 80, "0": 20},
        "pyramid_num_inference_steps_list": [50, 50], "max_area": 64 * 64, "upsampling_width": 64,
        "max_sequence_length": 6000, "prompt_max_new_tokens": 4096,
    }  # fmt: skip

    assert check(STAGES, Request("a cat", **most)).arguments == {"prompt": "a cat", **most}


def test_our_own_names_are_not_suggested_for_themselves() -> None:
    assert "did you mean 'n'" not in str(refusal(n=2))


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
anything = st.one_of(plain, st.lists(st.integers()))


@given(st.dictionaries(st.sampled_from([*CARD.names(), "x"]), anything), st.booleans())
def test_whatever_is_said_is_a_job_or_a_refusal(said: dict[str, Any], from_json: bool) -> None:
    try:
        job = check(CARD, Request(**said), from_json=from_json)
    except errors.Rejected:
        return

    assert 0 <= job.seed <= MAX_SEED
    assert {name for name, value in job.arguments.items() if value is None} <= {
        name for name, value in said.items() if value is None
    }


@pytest.mark.parametrize(
    ("name", "given", "plain"),
    [
        ("num_inference_steps", np.int64(7), 7), ("guidance_scale", np.float32(1.5), 1.5),
        ("guidance_scale", np.array(2), 2.0), ("use_karras", np.bool_(True), True),
        ("sigmas", np.linspace(1, 0.5, 3), [1.0, 0.75, 0.5]),
        ("sigmas", [np.float64(1), 0.5], [1.0, 0.5]), ("guidance_scale", torch.tensor(2.5), 2.5),
        ("sigmas", torch.tensor([1.0, 0.5]), [1.0, 0.5]),
    ],
)  # fmt: skip
def test_numbers_of_numpy_and_torch_are_numbers(name: str, given: Any, plain: Any) -> None:
    said = {name: given, "seed": np.int64(3)}
    value = check(CARD, Request("a cat", **said)).arguments[name]

    assert value == plain
    assert type(value) is type(plain)


def with_kinds(name: str, *kinds: ParameterKind) -> Card:
    [task] = CARD.tasks
    parameters = (*task.parameters, Parameter(name, kinds[0], also=kinds[1:]))
    return replace(CARD, tasks=(replace(task, parameters=parameters),))


def test_a_parameter_takes_all_kinds_of_its_annotation_over_http_too() -> None:
    scale = with_kinds("scale", "float", "list")
    extra = with_kinds("extra", "other", "dict")

    for value in (0.5, [0.5, 1.0], [[0, 1], [1, 0]]):
        assert check(scale, Request("a", scale=value), from_json=True).arguments["scale"] == value
    given = {"a": [1, {"b": None}]}
    assert check(extra, Request("a", extra=given), from_json=True).arguments["extra"] == given
    with pytest.raises(errors.InvalidValue, match="must be a finite number"):
        check(scale, Request("a", scale=[float("nan")]), from_json=True)
    with pytest.raises(errors.InvalidValue, match=r"extra=.*: must be an object"):
        check(extra, Request("a", extra=[1]), from_json=True)


def test_a_pipeline_that_needs_no_prompt_is_asked_without() -> None:
    [task] = CARD.tasks
    card = replace(CARD, tasks=(replace(task, needs_prompt=False),))

    assert "prompt" not in check(card, Request()).arguments


# Texts

ENCODERS = ("prompt", "prompt_2", "prompt_3")
TEXTS = tuple(f"{sign}{name}" for name in ENCODERS for sign in ("", "negative_"))
OF_TEXTS = (*(Parameter(name, "str") for name in TEXTS), Parameter("instructions", "other"))
WORDY = replace(CARD, tasks=(Task("text-to-image", "WordyPipeline", OF_TEXTS),))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("from_json", [False, True])
def test_every_text_is_limited_not_the_prompt_alone(name: str, from_json: bool) -> None:
    def ask(size: int) -> None:
        said: dict[str, Any] = {"prompt": "", name: "a" * size}
        check(WORDY, Request(**said), from_json=from_json)

    ask(MOST_TEXT)
    with pytest.raises(errors.InvalidValue) as refused:
        ask(MOST_TEXT + 1)

    assert refused.value.message == f"{name} has 32001 characters: must have at most 32000"
    assert refused.value.param == name


def test_texts_are_limited_together_too() -> None:
    four: dict[str, Any] = dict.fromkeys(TEXTS[:4], "a" * (MOST_TEXTS // 4))
    check(WORDY, Request(**four))

    with pytest.raises(
        errors.InvalidValue, match="have 64001 characters together: must have at most"
    ):
        check(WORDY, Request(**{**four, TEXTS[4]: "a"}))


@pytest.mark.parametrize("wrap", [lambda text: [text], lambda text: [{"": (text,)}],
                                  lambda text: {text: 1}])  # fmt: skip
def test_texts_within_lists_count(wrap: Any) -> None:
    check(WORDY, Request("", instructions=wrap("a" * MOST_TEXT)))

    with pytest.raises(errors.InvalidValue, match="instructions has 32001 characters"):
        check(WORDY, Request("", instructions=wrap("a" * (MOST_TEXT + 1))))


def test_defaults_of_a_model_are_not_the_callers_and_do_not_count() -> None:
    own = replace(WORDY, defaults={"negative_prompt": "a" * 40_000})

    assert check(own, Request("")).arguments["negative_prompt"] == "a" * 40_000


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("steps", "; did you mean 'num_inference_steps'?"),
        ("cfg", "; did you mean 'guidance_scale'?"),
        ("CFG_scale", "; did you mean 'guidance_scale'?"),
        ("Width", "; did you mean 'width'?"),
        ("size", ": say width and height, in pixels"),
        ("sampler_name", "; did you mean 'scheduler'?"),
        ("torch_dtype", ": it is a setting of the server or engine"),
    ],
)
@pytest.mark.parametrize("from_json", [True, False], ids=["HTTP", "Python"])
def test_names_from_other_programs_are_pointed_at_ours(
    name: str, told: str, from_json: bool
) -> None:
    refused = refusal(from_json=from_json, **{name: "4"})

    assert type(refused) is errors.UnknownParameter
    assert refused.param == name
    assert str(refused).startswith(f"TestPipeline has no parameter {name!r}{told}")


@pytest.mark.parametrize(
    ("declared", "name", "told"),
    [
        ("prompt true_cfg_scale", "cfg", "; did you mean 'true_cfg_scale'?"),
        ("label", "prompt", ": it takes label"),
        ("prompt", "negative_prompt", ": it takes prompt"),
        ("prompt neg_prompt", "negative_prompt", "; did you mean 'neg_prompt'?"),
        ("prompt", "strength", ": it takes prompt"),
        ("prompt latents", "strength", ": it takes prompt, latents"),
        ("label", "guidance_scale", ": it takes label"),
        ("prior_guidance_scale", "guidance_scale", "; did you mean 'prior_guidance_scale'?"),
        ("prompt guidance_scale", "true_cfg_scale", "; did you mean 'guidance_scale'?"),
        ("prompt sigmas", "image", ": it takes prompt, sigmas"),
        ("prompt image", "mask_image", ": it takes prompt, image"),
        ("prompt", "batch_size", ": say n, the number of outputs for each prompt"),
        ("prompt frames", "num_frames", "; did you mean 'frames'?"),
        ("prompt batch_size", "size", ": it takes prompt, batch_size"),
        ("prompt frame_size", "size", "; did you mean 'frame_size'?"),
        ("prompt", "seconds", ": it takes prompt"),
        ("prompt audio_end_in_s", "seconds", "; did you mean 'audio_end_in_s'?"),
        ("prompt num_frames", "seconds", ": say num_frames, which is seconds x frames a second"),
        ("a b c d e f g h i", "width", ": it takes a, b, c, d, e, f, g, h, ..."),
        ("return_dict", "width", ""),
    ],
)
def test_what_a_model_lacks_is_refused_with_what_it_takes(
    declared: str, name: str, told: str
) -> None:
    values: dict[str, Any] = {name: "4"}
    parameters = tuple(Parameter(n, "str") for n in declared.split())
    task = Task("text-to-image", "TestPipeline", parameters)

    with pytest.raises(errors.UnknownParameter) as refused:
        check(replace(CARD, tasks=(task,), defaults={}), Request(**values), from_json=True)

    assert str(refused.value) == f"TestPipeline has no parameter {name!r}{told}"


def test_pictures_that_another_task_can_do_without_are_not_asked_for() -> None:
    names = ("prompt", "image", "strength", "ip_adapter_image")
    tasks = [Task(n, "P", tuple(Parameter(n, "other") for n in p)) for n, p in
             (("text-to-image", names[:1]), ("image-to-image", names))]  # fmt: skip

    with pytest.raises(errors.UnknownParameter, match=r"image-to-image takes it, with image$"):
        check(replace(CARD, tasks=tuple(tasks), defaults={}), Request("a cat", strength=0.5))


def test_a_pipelines_own_default_size_wins_over_what_its_model_was_made_for() -> None:
    sides = (Parameter("width", "int", default=48), Parameter("height", "int", default=32))
    task = Task(name="text-to-image", pipeline="Mine", parameters=sides)
    card = replace(STAGES, tasks=(task,), default_size_px=(1024, 1024))

    assert card.usual_size_px == (48, 32)
    assert replace(card, tasks=STAGES.tasks).usual_size_px == (1024, 1024)
