"""Callbacks and helpers that hold the user's own `pipe`, or keep state of their own."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from support.custom.base import kind

Step = Callable[[Any, int, Any, dict[str, Any]], Any]


def callback(name: str, **options: Any) -> Callable[[Callable[[Any], Step]], Any]:
    """A kind whose requests have a callback: a function of the user's pipeline makes it."""

    def add(make: Callable[[Any], Step]) -> Any:
        def change(pipe: Any) -> Any:
            return lambda: {"callback_on_step_end": make(pipe)}

        kind(name, **options)(change)
        return make

    return add


def scaled(kwargs: dict[str, Any], scale: float) -> dict[str, Tensor]:
    return {"latents": kwargs["latents"] * (1 + scale)}


@callback("a stop button: the outer pipe's _interrupt")
def stop(pipe: Any) -> Step:
    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        pipe._interrupt = i >= 1
        return {}

    return step


@callback("the argument's _interrupt")
def stop_own(pipe: Any) -> Step:
    return lambda p, i, t, kwargs: setattr(p, "_interrupt", i >= 2)


@callback("the outer pipe's _guidance_scale, written")
def guidance(pipe: Any) -> Step:
    return lambda p, i, t, kwargs: setattr(pipe, "_guidance_scale", 0.5 + i)


@callback("the outer pipe's guidance_scale, read")
def guidance_read(pipe: Any) -> Step:
    return lambda p, i, t, kwargs: scaled(kwargs, pipe.guidance_scale / 10)


@callback("the outer pipe's scheduler.step_index")
def step_index(pipe: Any) -> Step:
    return lambda p, i, t, kwargs: scaled(kwargs, 0.1 * (pipe.scheduler.step_index or 0))


@callback("the outer pipe's scheduler.timesteps")
def timesteps(pipe: Any) -> Step:
    return lambda p, i, t, kwargs: scaled(kwargs, float(pipe.scheduler.timesteps[-1]) / 1000)


@callback("the outer pipe's scheduler.sigmas, written")
def sigmas(pipe: Any) -> Step:
    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        if i == 0:
            pipe.scheduler.sigmas[2:] *= 0.9
        return {}

    return step


@callback("the outer pipe's scheduler, exchanged")
def exchange(pipe: Any) -> Step:
    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        if i == 0:
            other = FlowMatchEulerDiscreteScheduler(shift=2.0)
            other.set_timesteps(p._num_timesteps)
            other._step_index = 1
            pipe.scheduler = other
        return {}

    before = pipe.scheduler

    def restoring(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        step(p, i, t, kwargs)
        if i == p._num_timesteps - 1:
            pipe.scheduler = before
        return {}

    return restoring


@callback("a helper with self.pipe")
def helper(pipe: Any) -> Step:
    class Helper:
        def __init__(self) -> None:
            self.pipe = pipe

        def step(self, p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
            return scaled(kwargs, len(self.pipe.scheduler.timesteps) / 100)

    return Helper().step


@callback("the outer pipe's net, called")
def call_net(pipe: Any) -> Step:
    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        x = kwargs["latents"]
        return {"latents": x + 0.1 * pipe.unet(x, t.expand(1), torch.ones(1, 3, 8))[0]}

    return step


@callback("the outer pipe's net, an attribute written")
def write_net(pipe: Any) -> Step:
    inner = pipe.unet.middle.forward

    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        pipe.unet.middle.forward = lambda x: inner(x) * (1 + 0.2 * i)
        if i >= p._num_timesteps - 1:
            del pipe.unet.middle.forward
        return {}

    return step


@callback("the outer pipe's new attribute, read by the next step")
def notes(pipe: Any) -> Step:
    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        pipe.notes = [] if i == 0 else [*pipe.notes, i]
        return scaled(kwargs, 0.1 * len(p.notes))

    return step


@callback("whether the argument is the outer pipe")
def identity(pipe: Any) -> Step:
    return lambda p, i, t, kwargs: scaled(kwargs, 0.1 if p is pipe else 0.0)


@callback("a partial with the outer pipe")
def partial(pipe: Any) -> Step:
    def step(own: Any, p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        own._guidance_scale = 4.0 - i
        return {}

    return functools.partial(step, pipe)


@callback("a default argument with the outer pipe")
def default(pipe: Any) -> Step:
    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any], own: Any = pipe) -> Any:
        return scaled(kwargs, own._guidance_scale / 20)

    return step


_PIPES: dict[str, Any] = {}


@callback("a global dict with the outer pipe")
def in_dict(pipe: Any) -> Step:
    _PIPES["pipe"] = pipe
    return lambda p, i, t, kwargs: scaled(kwargs, _PIPES["pipe"]._guidance_scale / 20)


@callback("an object with __call__ that keeps the outer pipe's scheduler")
def with_scheduler(pipe: Any) -> Step:
    class Called:
        scheduler = pipe.scheduler

        def __call__(self, p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
            return scaled(kwargs, float(self.scheduler.sigmas[i]) / 10)

    return Called()


@callback("memory of the request before the step")
def memory(pipe: Any) -> Step:
    kept: list[Tensor] = []

    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        kept.append(kwargs["latents"])
        return {"latents": torch.stack(kept).mean(0)}

    return step


_SHARED: list[int] = []


@callback("a list that all callbacks share")
def shared(pipe: Any) -> Step:
    def step(p: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        if i == 0:
            _SHARED.clear()
        _SHARED.append(i)
        return scaled(kwargs, 0.02 * len(_SHARED))

    return step


@callback("random numbers of the process")
def draws(pipe: Any) -> Step:
    return lambda p, i, t, kwargs: {"latents": kwargs["latents"] + 0.1 * torch.randn(1, 4, 8, 8)}
