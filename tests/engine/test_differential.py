"""The core promise: in any company, a request gets the picture that plain diffusers gives it alone.

Each family takes one `Ride`: requests of all kinds board an engine at different turns, one is
cancelled on the way and one fails, and what the others get is compared with `solo`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline
from PIL import Image

import carpool
from carpool.engine.observe.timeline import Forward
from carpool.errors import Cancelled, PipelineFailed
from support.engine_driver import CLOSE, Drive, Recorder, driving, gap, mean, plain, served, solo
from support.tiny import ARGUMENTS, checkpoint
from support.tiny.stable import FAMILIES

pytestmark = pytest.mark.filterwarnings(  # diffusers' Euler scheduler with numpy 2
    "ignore:__array__ implementation:DeprecationWarning"
)

LONG = "a painting of an astronaut riding a horse in the rain, with a red balloon and the moon"
NO_CFG = {"flux": {"guidance_scale": 0.0}}
TRUE_CFG = {"flux": {"true_cfg_scale": 3.0}}  # without it a negative prompt is not read

PASSENGERS: dict[str, tuple[int, str, dict[str, Any]]] = {  # turn of arrival, prompt, arguments
    "first": (0, "a photo of a cat", {"seed": 1, "num_inference_steps": 6}),
    "unguided": (0, "a dog", {"seed": 2, "num_inference_steps": 5, "guidance_scale": 1.0}),
    "negative": (
        0,
        "the moon",
        {"seed": 3, "num_inference_steps": 6, "negative_prompt": "bad, blurry"},
    ),
    "cancelled": (0, "a monkey", {"seed": 4, "num_inference_steps": 9}),
    "failing": (3, "a horse", {"seed": 5, "num_inference_steps": 8}),
    "long prompt": (5, LONG, {"seed": 6, "num_inference_steps": 4, "guidance_scale": 9.0}),
    "late": (8, "", {"seed": 7, "num_inference_steps": 2, "guidance_scale": 2.5}),
}
ARRIVING = [name for name in PASSENGERS if name not in ("cancelled", "failing")]


@dataclass(frozen=True)
class Ride:
    family: str
    heard: Mapping[str, Recorder]
    forwards: list[Forward]
    drive: Drive


def arguments_of(family: str, name: str) -> dict[str, Any]:
    _, _, arguments = PASSENGERS[name]
    extra = NO_CFG.get(family, {}) if name == "unguided" else {}
    extra |= TRUE_CFG.get(family, {}) if name == "negative" else {}
    return {**ARGUMENTS[family], **arguments, **extra}


def break_down(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 2:
        raise ArithmeticError("a puncture")
    return tensors


@pytest.fixture(scope="module", params=FAMILIES)
def ride(request: pytest.FixtureRequest) -> Ride:
    family = str(request.param)
    with driving(family, max_batch_size=12) as drive:
        heard: dict[str, Recorder] = {}
        for turn in range(9):
            for name, (arrives_at, prompt, _) in PASSENGERS.items():
                if arrives_at == turn:
                    callback = {"callback_on_step_end": break_down} if name == "failing" else {}
                    heard[name] = drive.submit(prompt, **arguments_of(family, name), **callback)
            drive.turn()
        drive.turn_until(lambda: heard["cancelled"].step >= 3)
        drive.engine.cancel(heard["cancelled"].events[0].request_id)
        drive.finish()
        return Ride(family, heard, drive.forwards, drive)


@pytest.mark.parametrize("name", ARRIVING)
def test_whoever_comes_and_goes_each_gets_what_it_gets_alone(ride: Ride, name: str) -> None:
    _, prompt, _ = PASSENGERS[name]

    alone = solo(ride.family, prompt, **arguments_of(ride.family, name))

    assert gap(ride.heard[name].image, alone) < CLOSE


def test_who_is_cancelled_or_fails_on_the_way_hears_why(ride: Ride) -> None:
    cancelled, failing = ride.heard["cancelled"], ride.heard["failing"]

    assert isinstance(cancelled.error, Cancelled)
    assert isinstance(failing.error, PipelineFailed)
    assert str(failing.error) == "the pipeline failed: ArithmeticError: a puncture"
    assert 3 <= cancelled.step < 9
    assert failing.step == 2  # the third step was run, and its callback raised


def test_denoising_is_shared(ride: Ride) -> None:
    shared = [forward.requests for forward in ride.forwards if forward.phase == "denoise"]

    assert mean(shared) > 1.5
    assert max(shared) >= 4


def test_text_encoding_is_shared(ride: Ride) -> None:
    encoders = {forward.component for forward in ride.forwards if forward.phase == "encode"}

    assert encoders
    for encoder in encoders:
        assert ride.drive.widest(encoder) >= 3


def test_statistics_count_what_was_run(ride: Ride) -> None:
    statistics = ride.drive.engine.statistics()

    assert sum(entry["count"] for entry in statistics["forwards"]) == len(ride.forwards)
    assert sum(entry["rows"] * entry["count"] for entry in statistics["forwards"]) == sum(
        forward.rows for forward in ride.forwards
    )
    assert statistics["requests"] == len(PASSENGERS)
    assert statistics["running"] == statistics["waiting"] == 0
    twice = ride.heard["failing"].step  # it failed among others, and ran again alone
    assert statistics["steps"] == sum(heard.step for heard in ride.heard.values()) + twice


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_shared(family: str) -> None:
    with driving(family) as drive:
        for seed in range(3):
            drive.submit(**ARGUMENTS[family] | {"num_inference_steps": 1}, seed=seed)
        drive.finish()

        assert drive.widths("vae", "decode") == [3]


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
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


def test_pictures_that_start_from_pictures_share_their_encoding_too() -> None:
    def image_to_image(pipe: DiffusionPipeline) -> DiffusionPipeline:
        return StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)

    rng = np.random.default_rng(0)
    arguments: list[dict[str, Any]] = [
        {
            "prompt": "a cat",
            "image": Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)),
            "strength": strength,
            "num_inference_steps": 4,
            "output_type": "pt",
        }
        for strength in (0.9, 0.5, 0.7)
    ]
    judge = image_to_image(plain("sd15"))
    judge.set_progress_bar_config(disable=True)

    with driving(image_to_image(served("sd15"))) as drive:
        heard = [drive.submit(**one, seed=3) for one in arguments]
        drive.finish()

    assert drive.widths("vae", "encode") == drive.widths("vae", "decode") == [3]
    for one, given in zip(heard, arguments, strict=True):
        alone = judge(**given, generator=torch.Generator().manual_seed(3)).images
        assert gap(one.image, alone) < CLOSE


def test_a_loaded_model_gives_the_same_pictures_on_its_own_thread() -> None:
    prompts = ["a cat", "a dog", "the moon", LONG]

    with carpool.load(checkpoint("sdxl"), device="cpu") as engine:
        outputs = engine.generate(prompts, seed=11, **ARGUMENTS["sdxl"])

    for prompt, output in zip(prompts, outputs, strict=True):
        assert gap(output.images, solo("sdxl", prompt, seed=11, **ARGUMENTS["sdxl"])) < CLOSE
