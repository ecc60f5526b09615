"""Skipped steps: decided by a request's own past alone, the same in any company, and reported."""

import functools
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from carpool.engine.intercept import Call, Interception
from carpool.engine.observe.timeline import Timeline
from carpool.engine.specs import SPECS, STACK, Spec
from carpool.engine.step_cache import StepCache
from carpool.errors import InvalidValue
from support.engine_driver import (
    CLOSE,
    Recorder,
    called,
    driving,
    for_inference,
    fresh,
    gap,
    served,
)
from support.tiny import ARGUMENTS

PROMPTS = ("a photo of a cat", "a dog", "the moon over a lake in the rain")


class Denoiser(nn.Module):
    def forward(self, x: Tensor, timestep: Tensor) -> tuple[Tensor]:
        return (2 * x,)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = Spec(rows="x", rules={"x": STACK, "timestep": STACK})
    monkeypatch.setitem(SPECS, ("Denoiser", "forward"), spec)
    [found] = Interception({"transformer": Denoiser()}).targets
    return found


def of_threshold(threshold: float) -> StepCache:
    return StepCache(threshold, Timeline("one", 0.0), lambda: None)


def answer_at(cache: StepCache, call: Call, step: int, steps: int) -> Any:
    cache.timeline.step, cache.timeline.steps = step, steps
    return cache.answer(call)


def played(target: Any, cache: StepCache, values: list[float], branches: int = 1) -> list[bool]:
    """One call a branch at each step, whose inputs are these values; which of them ran."""
    ran = []
    for step, value in enumerate(values):
        for branch in range(branches):
            x, time = torch.full((1, 4), value + branch), torch.tensor([float(-step)])
            call = Call(target, (x, time), {})
            answer = answer_at(cache, call, step, len(values))
            if answer is None:
                cache.ran(call, target.original(x, time))
            ran.append(answer is None)
    return ran


def test_the_first_two_steps_and_the_last_always_run(target: Any) -> None:
    cache = of_threshold(1.0)

    assert played(target, cache, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]) == [
        True, True, False, False, False, True,
    ]  # fmt: skip
    assert cache.timeline.skipped_steps == 3


def test_a_step_runs_once_the_predicted_change_reaches_the_threshold(target: Any) -> None:
    """Answers are twice their inputs, so they change at the rate 2, as their size does."""
    cache = of_threshold(0.25)

    ran = played(target, cache, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8])

    # relative to the call at 1.1: 0.09, 0.18, 0.27; to the one at 1.4: 0.07, 0.14, 0.21
    assert ran == [True, True, False, False, True, False, False, False, True]


def test_guidance_branches_have_answers_of_their_own_and_are_skipped_together(target: Any) -> None:
    cache, given = of_threshold(1.0), []
    for step, value in enumerate([1.0, 1.1, 1.2, 1.3]):
        for branch in (0.0, 5.0):
            x, time = torch.full((1, 4), value + branch), torch.tensor([float(-step)])
            call = Call(target, (x, time), {})
            answer = answer_at(cache, call, step, 4)
            if answer is None:
                cache.ran(call, target.original(x, time))
            elif step == 2:
                given.append(float(answer[0][0, 0]))

    assert given == pytest.approx([2.2, 12.2])
    assert cache.timeline.skipped_steps == 1


def test_an_answer_that_is_changed_in_place_is_not_given_changed_again(target: Any) -> None:
    cache = of_threshold(1.0)
    call = Call(target, (torch.ones(1, 4), torch.tensor([0.0])), {})
    for moment in range(2):
        call = Call(target, (torch.full((1, 4), 1.0 + moment), torch.tensor([float(moment)])), {})
        answer_at(cache, call, moment, 9)
        cache.ran(call, target.original(*call.args))
    for moment in (2, 3):
        again = Call(target, (call.args[0], torch.tensor([float(moment)])), {})
        answers = answer_at(cache, again, moment, 9)
        assert answers is not None
        [answer] = answers
        assert float(answer[0, 0]) == 4.0
        answer.zero_()


def test_inputs_of_another_shape_run(target: Any) -> None:
    cache = of_threshold(1.0)
    played(target, cache, [1.0, 1.0, 1.0])
    x, time = torch.ones(1, 8), torch.tensor([5.0])

    assert answer_at(cache, Call(target, (x, time), {}), 3, 9) is None


def judged(family: str, threshold: float, arguments: dict[str, Any]) -> tuple[Tensor, int]:
    """Plain diffusers whose denoiser asks a cache of its own; the picture, and steps skipped."""
    pipe: DiffusionPipeline = for_inference(fresh(family))
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    [target] = [one for one in Interception(pipe.components).targets if one.module is denoiser]
    cache, plain = of_threshold(threshold), denoiser.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = Call(target, args, kwargs)
        step, steps = pipe.scheduler.step_index or 0, len(pipe.scheduler.timesteps)
        answer = answer_at(cache, call, step, steps)
        if answer is None:
            answer = plain(*args, **kwargs)
            cache.ran(call, answer)
        return answer

    denoiser.forward = forward
    return called(pipe, **arguments).images, cache.timeline.skipped_steps


@pytest.mark.parametrize("family", ["flux", "qwen_image", "sdxl"])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_in_mixed_company_a_request_skips_the_steps_that_it_would_skip_alone(family: str) -> None:
    requests = [
        {**ARGUMENTS[family], "prompt": prompt, "seed": seed, "num_inference_steps": 10 + seed}
        for seed, prompt in enumerate(PROMPTS)
    ]
    thresholds = (0.7, 0.0, 1.0)
    if family == "qwen_image":  # two calls a step
        for request in requests:
            request |= {"true_cfg_scale": 4.0, "negative_prompt": "bad"}
    with driving(served(family)) as drive:
        heard: list[Recorder] = []
        for request, threshold in zip(requests, thresholds, strict=True):
            heard.append(drive.submit(**request, step_cache=threshold))
            drive.turn(3)
        drive.finish()

    skipped = []
    for recorder, request, threshold in zip(heard, requests, thresholds, strict=True):
        expected, steps = judged(family, threshold, request) if threshold else (None, 0)
        skipped.append(steps)
        assert recorder.outcome.skipped_steps == steps
        if expected is not None:
            assert gap(recorder.outcome.fields["images"], expected) < CLOSE
        kinds = [event.step for event in recorder.events if event.kind == "step"]
        assert kinds[-1] == request["num_inference_steps"]
    assert skipped[0] > 0, skipped
    assert skipped[2] > 0, skipped


def test_the_server_s_own_threshold_is_for_requests_that_say_none() -> None:
    arguments = {**ARGUMENTS["flux"], "num_inference_steps": 8}
    with driving(served("flux"), step_cache=0.9) as drive:
        silent = drive.submit(**arguments)
        refusing = drive.submit(**arguments, step_cache=0)
        drive.finish()
        counted = drive.engine.statistics()["steps_skipped"]

    assert silent.outcome.skipped_steps > 0
    assert refusing.outcome.skipped_steps == 0
    assert counted == silent.outcome.skipped_steps


def test_a_skipped_step_takes_no_forward_and_stands_in_the_timeline() -> None:
    with driving(served("flux")) as drive:
        recorder = drive.submit(**{**ARGUMENTS["flux"], "num_inference_steps": 8}, step_cache=0.9)
        drive.finish()
        request_id = recorder.outcome.request.request_id
        told = drive.engine.timeline(request_id)

    skipped = recorder.outcome.skipped_steps
    assert len(drive.widths("transformer")) == 8 - skipped
    assert told is not None
    assert told["skipped_steps"] == skipped > 0


@pytest.mark.parametrize("threshold", [-0.1, 1.5, "much", True, float("nan")])
def test_a_threshold_out_of_range_is_refused(threshold: Any) -> None:
    with driving(served("flux")) as drive, pytest.raises(InvalidValue, match="from 0") as refused:
        drive.submit(step_cache=threshold)

    assert refused.value.param == "step_cache"
