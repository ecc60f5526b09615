"""Rides: shared, and private for a request that changes a module."""

import logging
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from support.engine_driver import CLOSE, Drive, Recorder, called, driving, for_inference, fresh
from support.tiny import ARGUMENTS

COMMON: dict[str, Any] = {
    "height": 32, "width": 32, "guidance_scale": 3.5, "output_type": "pt", "num_inference_steps": 4
}  # fmt: skip


COMPONENT = "Transformer"


def change(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
    """Halve what the denoiser's first layer gives, from the second step on."""
    layer = getattr(pipe, COMPONENT.lower()).x_embedder  # nothing says so before it runs
    layer.weight = torch.nn.Parameter(layer.weight / 2, requires_grad=False)
    return {}


def changing(drive: Drive, seed: int) -> Recorder:
    return drive.submit("a cat", seed=seed, callback_on_step_end=change, **COMMON)


def plain(drive: Drive, seed: int) -> Recorder:
    return drive.submit("a cat", seed=seed, **COMMON)


def expected(seed: int, **more: Any) -> Tensor:
    image: Tensor = called(for_inference(fresh("flux")), seed, "a cat", **COMMON, **more).images[0]
    return image


def gap(recorder: Recorder, image: Tensor) -> float:
    return float((recorder.image[0] - image).abs().max())


def test_a_request_that_changes_a_module_runs_again_alone_and_the_others_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        driving(fresh("flux"), isolation="shared") as drive,
        caplog.at_level(logging.WARNING, "carpool"),
    ):
        others = [plain(drive, seed) for seed in (0, 1)]
        guilty = changing(drive, 2)
        drive.finish()

    [warning] = guilty.outcome.warnings
    assert warning == ("the request ran alone: FluxPipeline changed transformer.x_embedder")
    assert sum("such requests run alone" in line for line in caplog.messages) == 1
    assert gap(guilty, expected(2, callback_on_step_end=change)) == 0
    assert all(gap(other, expected(seed)) < 1e-5 for seed, other in enumerate(others))
    assert drive.widest("transformer") == 3


def test_after_two_of_them_all_requests_of_the_task_ride_alone() -> None:
    with driving(fresh("flux")) as drive:
        for seed in (0, 1):
            changing(drive, seed)
            drive.finish()
        drive.forwards.clear()
        later = [changing(drive, seed) for seed in (2, 3)]
        drive.finish()

    assert drive.widest("transformer") == 1
    assert len(drive.widths("transformer")) == 2 * 4  # none was begun twice
    for seed, recorder in zip((2, 3), later, strict=True):
        assert gap(recorder, expected(seed, callback_on_step_end=change)) == 0


def test_a_change_after_the_last_call_costs_no_second_run() -> None:
    def late(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        if step == COMMON["num_inference_steps"] - 1:
            pipe.vae.decoder.extra = 1
        return {}

    arguments = {**COMMON, "output_type": "latent"}
    with driving(fresh("flux")) as drive:
        recorder = drive.submit("a cat", seed=0, callback_on_step_end=late, **arguments)
        drive.finish()
        assert not hasattr(drive.engine.loaded.pipe.vae.decoder, "extra")

    assert recorder.error is None
    assert len(drive.widths("transformer")) == COMMON["num_inference_steps"]


def test_one_that_is_cancelled_before_it_runs_again_holds_up_no_other() -> None:
    with driving(fresh("flux")) as drive:
        arguments = {"request_id": "guilty", "callback_on_step_end": change, **COMMON}
        guilty = drive.submit("a cat", seed=0, **arguments)
        drive.turn_until(lambda: any(one.component == "transformer" for one in drive.forwards))
        drive.engine.cancel("guilty")
        other = plain(drive, 1)
        drive.finish()

    assert guilty.error is not None
    assert gap(other, expected(1)) < 1e-5


def with_lora() -> Any:
    pipe: Any = fresh("sd15")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module, layers in ((pipe.unet, UNET), (pipe.text_encoder, TEXT)):
            config = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
            module.add_adapter(config, adapter_name="style")
            module.requires_grad_(False)
    return pipe


UNET, TEXT = ["to_q", "to_v"], ["q_proj", "v_proj"]


def test_the_scale_of_a_lora_that_the_user_has_loaded_is_each_requests_own() -> None:
    common = {"height": 32, "width": 32, "output_type": "pt", "num_inference_steps": 3}
    scales: list[dict[str, Any]] = [
        {},
        *({"cross_attention_kwargs": {"scale": s}} for s in (0.2, 0.8)),
    ]
    with driving(with_lora()) as drive:
        recorders = [drive.submit("a cat", seed=1, **common, **scale) for scale in scales]
        drive.finish()

    for recorder, scale in zip(recorders, scales, strict=True):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            image = with_lora()("a cat", generator=generator, **common, **scale).images[0]
        assert gap(recorder, image) < 1e-5
    [warning] = recorders[1].outcome.warnings
    assert re.fullmatch(r".*StableDiffusionPipeline changed text_encoder\S+ and \d+ more", warning)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_scales_that_turn_no_layer_share_forwards(numerics: Any) -> None:
    kwargs: list[Any] = [None, {}, {"scale": 0.2}, {"scale": 0.8}]
    common: dict[str, Any] = {**ARGUMENTS["sd15"], "num_inference_steps": 3}
    with driving(fresh("sd15"), numerics=numerics) as drive:
        recorders = [
            drive.submit("a cat", seed=seed, **common, cross_attention_kwargs=value)
            for seed, value in enumerate(kwargs)
        ]
        drive.finish()
        assert drive.widths("unet")[-1] == len(kwargs)

    for seed, (value, recorder) in enumerate(zip(kwargs, recorders, strict=True)):
        generator, pipe = torch.Generator().manual_seed(seed), fresh("sd15")
        image = pipe("a cat", generator=generator, **common, cross_attention_kwargs=value).images
        assert gap(recorder, image) <= (0 if numerics == "exact" else CLOSE)


def test_a_request_that_rides_alone_says_why_and_so_do_the_statistics() -> None:
    with driving(fresh("flux")) as drive:
        guilty, other = changing(drive, 0), plain(drive, 1)
        drive.finish()
        isolation = drive.engine.statistics()["isolation"]

    [warning] = guilty.outcome.warnings
    [cause] = isolation["private"]["text-to-image"]
    assert warning == f"the request ran alone: {cause}"
    assert "x_embedder" in cause
    assert isolation["mode"] == "auto"
    assert other.outcome.warnings == ()


def test_where_all_are_private_no_answer_warns_of_it() -> None:
    with driving(fresh("flux"), isolation="private") as drive:
        request = plain(drive, 0)
        drive.finish()
        assert drive.engine.statistics()["isolation"]["private"] == {
            "text-to-image": ["isolation is private"]
        }

    assert request.outcome.warnings == ()


def test_only_one_request_runs_at_a_time_and_all_of_its_forwards_follow_each_other() -> None:
    with driving("flux", isolation="private") as drive:
        for seed in range(3):
            drive.submit("a cat", seed=seed, **COMMON)
        drive.finish()

    riders = [forward.timelines[0].request_id for forward in drive.forwards]
    assert all(forward.requests == 1 for forward in drive.forwards)
    assert sum(one != other for one, other in pairwise(riders)) == 2


def test_a_cancelled_request_does_not_start_those_again_that_wait_for_its_end() -> None:
    with driving(fresh("sd15"), isolation="private") as drive:
        waiting = [drive.submit("a cat", seed=seed, num_inference_steps=2) for seed in range(3)]
        drive.submit("a cat", request_id="cancelled")
        drive.turn()
        drive.engine.cancel("cancelled")
        drive.finish()

    assert [len(one.outcomes) for one in waiting] == [1, 1, 1]
    assert [one.kinds.count("started") for one in waiting] == [1, 1, 1]
