"""Who shares a forward, who does not, and what is counted of it; pictures are plain diffusers'.

That requests of all kinds get in company what they get alone is held, for each family and task, by
`tests/matrix/test_matrix.py`.
"""

from typing import Any

import pytest

import carpool
from support.engine_driver import CLOSE, driving, gap, solo
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.filterwarnings(  # diffusers' Euler scheduler with numpy 2
    "ignore:__array__ implementation:DeprecationWarning"
)

STABLE = ("flux", "sd3", "sdxl", "sd15")
LONG = "a painting of an astronaut riding a horse in the rain, with a red balloon and the moon"


def break_down(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 2:
        raise ArithmeticError("a puncture")
    return tensors


def test_statistics_count_what_was_run() -> None:
    steps = {"num_inference_steps": 4}
    with driving("flux") as drive:
        heard = [drive.submit("a cat", **ARGUMENTS["flux"] | steps, seed=seed) for seed in range(3)]
        failing = drive.submit("a dog", **ARGUMENTS["flux"], callback_on_step_end=break_down)
        drive.finish()
        statistics = drive.engine.statistics()

    assert str(failing.error) == "the pipeline failed: ArithmeticError: a puncture"
    assert failing.step == 2  # the third step was run, and its callback raised
    assert sum(entry["count"] for entry in statistics["forwards"]) == len(drive.forwards)
    assert sum(entry["rows"] * entry["count"] for entry in statistics["forwards"]) == sum(
        forward.rows for forward in drive.forwards
    )
    assert statistics["requests"] == 4
    assert statistics["running"] == statistics["waiting"] == 0
    twice = failing.step  # it failed among others, and ran again alone
    assert statistics["steps"] == sum(one.step for one in (*heard, failing)) + twice


@pytest.mark.parametrize("family", STABLE)
def test_decoding_is_shared(family: str) -> None:
    with driving(family) as drive:
        for seed in range(3):
            drive.submit(**ARGUMENTS[family] | {"num_inference_steps": 1}, seed=seed)
        drive.finish()

        assert drive.widths("vae", "decode") == [3]


@pytest.mark.parametrize("family", STABLE)
def test_off_runs_one_call_at_a_time_in_order_of_submission(family: str) -> None:
    prompts = ["a cat", "a dog in the rain", "the moon"]
    arguments = {**ARGUMENTS[family], "num_inference_steps": 2}
    ended: list[str] = []

    with driving(family, mode="off") as drive:
        heard = [drive.submit(prompt, **arguments, seed=5) for prompt in prompts]
        while drive.engine.step():
            ended = [p for p, h in zip(prompts, heard, strict=True) if h.is_done]
            assert ended == prompts[: len(ended)]

    assert ended == prompts
    assert {forward.requests for forward in drive.forwards} == {1}
    for prompt, one in zip(prompts, heard, strict=True):
        assert gap(one.image, solo(family, prompt, **arguments, seed=5)) == 0


@pytest.mark.parametrize("family", STABLE)
def test_sizes_ride_side_by_side_but_never_in_one_forward(family: str) -> None:
    large = {**ARGUMENTS[family], "num_inference_steps": 2}
    small = {**large, "width": 32, "height": 32}
    sizes = [large, small, large, small]

    with driving(family) as drive:
        heard = [drive.submit("a cat", **size, seed=i) for i, size in enumerate(sizes)]
        drive.finish()

    for i, (one, size) in enumerate(zip(heard, sizes, strict=True)):
        assert gap(one.image, solo(family, "a cat", **size, seed=i)) < CLOSE
    denoising = [forward.requests for forward in drive.forwards if forward.phase == "denoise"]
    assert set(denoising) == {2}


TOGETHER: dict[str, tuple[list[dict[str, Any]], int]] = {  # and the widest forward of denoising
    "sizes of equal token count": ([{"width": 64, "height": 32}, {"width": 32, "height": 64}], 1),
    "prompts of several lengths": ([{"max_sequence_length": n} for n in (16, 48, 16)], 2),
    "true CFG beside none": (
        [
            {},
            {"true_cfg_scale": 4.0, "negative_prompt": "a red balloon"},
            {"true_cfg_scale": 1.5, "negative_prompt": "", "guidance_scale": 1.0},
        ],
        3,
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_flux_shares_denoising_where_geometry_and_length_are_equal(name: str) -> None:
    requests, widest = TOGETHER[name]

    with driving("flux") as drive:
        heard = [drive.submit(LONG, **{**ARGUMENTS["flux"], **one}) for one in requests]
        drive.finish()

    for recorder, request in zip(heard, requests, strict=True):
        assert gap(recorder.image, solo("flux", LONG, **request)) < CLOSE
        assert recorder.step == 3  # two forwards a step are still one step
    assert drive.widest("transformer") == widest
    assert drive.widest("text_encoder") == len(requests)


def test_a_loaded_model_gives_the_same_pictures_on_its_own_thread() -> None:
    prompts = ["a cat", "a dog", "the moon", LONG]

    with carpool.load(checkpoint("sdxl"), device="cpu") as engine:
        outputs = engine.generate(prompts, seed=11, **ARGUMENTS["sdxl"])

    for prompt, output in zip(prompts, outputs, strict=True):
        assert gap(output.images, solo("sdxl", prompt, seed=11, **ARGUMENTS["sdxl"])) < CLOSE
