"""Acceleration packages, written anew: what they patch, and what they keep between steps."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from support.custom.base import FIRST, Custom, Net, kind
from support.custom.kinds.forwards import net


class DeepCache:
    """Wraps the calls of pipeline and blocks; at most steps the block's last answer stands."""

    def __init__(self, pipe: Any, interval: int = 3) -> None:
        self.pipe, self.interval = pipe, interval
        self.cached: Tensor | None = None
        self.start_timestep: float | None = None
        self.step = 0

    def enable(self) -> None:
        unet = self.pipe.unet
        self.outer, self.inner = unet.forward, unet.middle.forward
        unet.forward, unet.middle.forward = self.wrapped_outer, self.wrapped_inner

    def wrapped_outer(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        steps = list(self.pipe.scheduler.timesteps)
        now = float(timestep[0])
        self.step = next((i for i, t in enumerate(steps) if float(t) == now), 0)
        if self.start_timestep is None or now >= FIRST:
            self.start_timestep, self.cached = now, None
        return self.outer(sample, timestep, words)

    def wrapped_inner(self, x: Tensor) -> Tensor:
        if self.step % self.interval == 0 or self.cached is None:
            self.cached = self.inner(x)
        return self.cached


@kind("DeepCache: a helper that wraps forward of the net and a block")
def deep_cache(pipe: Any) -> None:
    helper = DeepCache(pipe)
    helper.enable()
    pipe.deep_cache = helper


@kind("DeepCache that the user alone keeps")
def deep_cache_outside(pipe: Any) -> None:
    DeepCache(pipe, interval=2).enable()


class Teased(Net):
    """TeaCache as its README has it: counters and the last residual on the class."""

    n, steps, rel, total = 0, 4, 0.3, 0.0
    before: Tensor | None = None
    residual: Tensor | None = None

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        if float(timestep[0]) >= FIRST:
            self.n, self.total = 0, 0.0
        runs = self.n == 0
        if not runs and self.before is not None:
            change = (sample - self.before).abs().mean() / self.before.abs().mean()
            self.total += float(change)
            runs = self.total >= self.rel
        self.total = 0.0 if runs else self.total
        self.before, self.n = sample, self.n + 1
        if runs or self.residual is None:
            self.residual = self.body(sample, timestep, words) - sample
        return (sample + self.residual,)


net("TeaCache: counters on the instance of a class exchanged")(Teased)


class TeasedClass(Net):
    pass


@kind("TeaCache: forward and counters set on the class", net=TeasedClass)
def tea_cache(pipe: Any) -> None:
    cls = type(pipe.unet)
    cls.n, cls.kept = 0, None

    def forward(self: Any, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        cls = type(self)
        if float(timestep[0]) >= FIRST:
            cls.n, cls.kept = 0, None
        if cls.n % 2 == 0 or cls.kept is None:
            cls.kept = self.body(sample, timestep, words)
        cls.n += 1
        return (cls.kept,)

    cls.forward = forward


@kind("TeaCache that counts to a fixed number of steps")
def tea_cache_counting(pipe: Any) -> Any:
    unet = pipe.unet
    inner = unet.forward
    unet.n, unet.steps, unet.kept = 0, 6, None

    def forward(*args: Any) -> Any:
        unet.n += 1
        skips = unet.n % 2 == 0 and unet.n not in (1, unet.steps)
        if unet.n == unet.steps:
            unet.n = 0
        if not skips:
            unet.kept = inner(*args)[0]
        return (unet.kept,)

    unet.forward = forward
    return lambda: {"num_inference_steps": 6}


class FirstBlock(nn.Module):
    def __init__(self, inner: Any, state: SimpleNamespace) -> None:
        super().__init__()
        self.inner, self.state = inner, state

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.inner(x)
        last = self.state.first
        near = last is not None and float((answer - last).abs().mean() / last.abs().mean()) < 0.3
        self.state.skips, self.state.first = near, answer
        return answer


@kind("FirstBlockCache: blocks that talk over a shared context")
def first_block_cache(pipe: Any) -> None:
    state = SimpleNamespace(first=None, rest=None, skips=False)
    unet = pipe.unet
    unet.first, middle = FirstBlock(unet.first, state), unet.middle.forward

    def rest(x: Tensor) -> Tensor:
        if not state.skips or state.rest is None:
            state.rest = middle(x)
        return state.rest

    def reset(module: Any, args: Any) -> None:
        if float(args[1][0]) >= FIRST:
            state.first = state.rest = None

    unet.middle.forward = rest
    unet.register_forward_pre_hook(reset)


@kind("ToMe: a patched class with a generator of its own")
def merging(pipe: Any) -> None:
    info: dict[str, Any] = {"size": None, "generator": None}

    class Merging(type(pipe.unet)):  # type: ignore[misc]
        def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
            info["generator"] = info["generator"] or torch.Generator().set_state(
                torch.get_rng_state()
            )
            index = torch.randint(8, (1,), generator=info["generator"])
            merged = sample.index_select(2, index).expand(-1, -1, info["size"][0], -1)
            return super().forward((sample + merged) / 2, timestep, words)

    pipe.unet.__class__ = Merging
    pipe.unet.register_forward_pre_hook(lambda m, args: info.update(size=args[0].shape[2:]))

    def reset(module: Any, args: Any) -> None:
        if float(args[1][0]) >= FIRST:
            info["generator"] = None

    pipe.unet.register_forward_pre_hook(reset)


@kind("FreeU: scales by attribute, no state")
def free_u(pipe: Any) -> None:
    pipe.unet.middle.scale = 1.4
    inner = pipe.unet.middle.forward
    pipe.unet.middle.forward = lambda x: inner(x) * pipe.unet.middle.scale


@kind("FreeU switched on by one request's steps")
class FreeUInCall(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.unet.last.boost = 1 + i / 10
        noise = super().predict(i, x, t, words) * self.unet.last.boost
        del self.unet.last.boost
        return noise


class Sharing(Net):
    """StyleAligned: all rows of a batch look at the first one."""

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        mixed = 0.7 * sample + 0.3 * sample[:1]
        return (self.body(mixed, timestep, words) - 0.1 * words.mean(),)


net("StyleAligned: rows look at the first row")(Sharing)


@kind("a broadcast of attention: computed at every third call of a decorator")
def broadcast(pipe: Any) -> None:
    def every_third(call: Any) -> Any:
        @functools.wraps(call)
        def wrapper(*args: Any) -> Any:
            if wrapper.n % 3 == 0:  # type: ignore[attr-defined]
                wrapper.kept = call(*args)  # type: ignore[attr-defined]
            wrapper.n += 1  # type: ignore[attr-defined]
            return wrapper.kept  # type: ignore[attr-defined]

        wrapper.n = 0  # type: ignore[attr-defined]
        return wrapper

    pipe.unet.middle.forward = every_third(pipe.unet.middle.forward)

    def reset(module: Any, args: Any) -> None:
        if float(args[1][0]) >= FIRST:
            pipe.unet.middle.forward.n = 0

    pipe.unet.register_forward_pre_hook(reset)


@kind("a schedule of skipped steps that a wrapper of the scheduler's step keeps")
def scheduled(pipe: Any) -> None:
    step, box = pipe.scheduler.step, {"n": 0}

    def counted(noise: Tensor, t: Tensor, x: Tensor, **options: Any) -> Any:
        box["n"] = 1 if float(t) >= FIRST else box["n"] + 1
        return step(noise * (1 + 0.1 * box["n"]), t, x, **options)

    pipe.scheduler.step = counted
