"""Private rides: the user's own pipeline, alone from start to end, and given back as it was."""

import inspect
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from torch import Tensor, nn

import carpool
from support.engine_driver import Drive, called, driving, for_inference, fresh
from support.isolation import differences, state_of

STEPS = (3, 5, 4, 6)
COMMON: dict[str, Any] = {"height": 32, "width": 32, "guidance_scale": 3.5, "output_type": "pt"}
Make = Callable[[], tuple[DiffusionPipeline, dict[str, Any]]]
"""Gives a fresh pipeline, and arguments of its requests beside the usual ones."""


def counter_of_class() -> tuple[DiffusionPipeline, dict[str, Any]]:
    """As TeaCache patches a model: counters and the last answer on the class."""
    pipe = fresh("flux")

    class Counting(FluxTransformer2DModel):  # type: ignore[misc]
        calls, last = 0, list[Tensor]()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            cls = type(self)
            cls.calls += 1
            if cls.calls % 2:
                cls.last = list(super().forward(*args, **kwargs))
            return tuple(cls.last)

    Counting.__module__ = "teacache"
    pipe.transformer.__class__ = Counting
    return pipe, {}


def patch_with_state() -> tuple[DiffusionPipeline, dict[str, Any]]:
    """As DeepCache patches a model: a method on the instance, state in a helper."""
    pipe = fresh("flux")
    plain, seen = pipe.vae.decode, {"calls": 0}

    def decode(*args: Any, **kwargs: Any) -> Any:
        seen["calls"] += 1
        [sample] = plain(*args, **kwargs)
        return (sample * (1 + 0.1 * seen["calls"]),)

    pipe.vae.decode = decode
    return pipe, {}


def hook_with_memory() -> tuple[DiffusionPipeline, dict[str, Any]]:
    pipe, last = fresh("flux"), list[Tensor]()

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        mixed = (output[0] + last[-1],) if last else output
        last[:] = [output[0].clone()]
        return mixed

    pipe.transformer.register_forward_hook(hook)
    return pipe, {}


def autocast_around_calls() -> tuple[DiffusionPipeline, dict[str, Any]]:
    pipe = fresh("flux")
    cls = type(pipe)

    class Half(cls):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().__call__(*args, **kwargs)

    Half.__call__.__signature__ = inspect.signature(cls.__call__)  # type: ignore[attr-defined]
    pipe.__class__ = Half
    return pipe, {}


def draws_of_every_kind() -> tuple[DiffusionPipeline, dict[str, Any]]:
    pipe = fresh("flux")

    def draw(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        number = torch.rand(()) + np.random.rand() + random.random()
        return {"latents": tensors["latents"] + number}

    return pipe, {"callback_on_step_end": draw}


KEEPING: list[Make] = [counter_of_class, patch_with_state, hook_with_memory]


def expected(make: Make, seed: int, steps: int) -> Tensor:
    """What plain diffusers gives with a fresh pipeline."""
    pipe, more = make()
    more = {**COMMON, **more, "num_inference_steps": steps}
    images: Tensor = called(for_inference(pipe), seed, "a cat", **more).images
    return images


def is_equal(images: Any, others: Tensor) -> bool:
    """The same bits."""
    return torch.equal(torch.as_tensor(images[0]), others[0])


@pytest.mark.parametrize("make", [*KEEPING, autocast_around_calls, draws_of_every_kind])
def test_every_request_gets_what_a_fresh_pipeline_gives_from_the_first_round_on(make: Make) -> None:
    plain = [expected(make, seed, steps) for seed, steps in enumerate(STEPS)]
    pipe, more = make()
    before = state_of(pipe)

    with carpool.load(pipe, device="cpu", isolation="private") as engine:
        for _ in range(2):
            requests = [
                engine.submit("a cat", seed=seed, num_inference_steps=steps, **COMMON, **more)
                for seed, steps in enumerate(STEPS)
            ]
            for request, images in zip(requests, plain, strict=True):
                assert is_equal(request.result(60).images, images)

    changed = differences(before, state_of(pipe))
    assert [name for name in changed if not name.startswith("_progress_bar")] == []


def cancelled(drive: Drive, more: dict[str, Any]) -> Any:
    """A request that is cancelled after some of its steps."""
    arguments = {"request_id": "ends", "num_inference_steps": 9, **COMMON, **more}
    request = drive.submit("a cat", seed=9, **arguments)
    drive.turn(6)
    drive.engine.cancel("ends")
    return request


def failing(drive: Drive, more: dict[str, Any]) -> Any:
    def fail(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        if step == 2:
            raise RuntimeError("a request that breaks")
        return {}

    arguments = {**COMMON, **more, "callback_on_step_end": fail}
    return drive.submit("a cat", seed=9, num_inference_steps=9, **arguments)


@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("ends", [cancelled, failing])
def test_the_next_request_sees_nothing_of_what_ended_early(
    make: Make, ends: Callable[[Drive, dict[str, Any]], Any]
) -> None:
    pipe, more = make()
    with driving(pipe, isolation="private") as drive:
        first = ends(drive, more)
        drive.finish()
        second = drive.submit("a cat", seed=1, num_inference_steps=5, **COMMON, **more)
        drive.finish()

    assert first.error is not None
    assert is_equal(second.image, expected(make, 1, 5))


def test_only_one_request_runs_at_a_time_and_all_of_its_forwards_follow_each_other() -> None:
    with driving("flux", isolation="private") as drive:
        for seed in range(3):
            drive.submit("a cat", seed=seed, num_inference_steps=3, **COMMON)
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
