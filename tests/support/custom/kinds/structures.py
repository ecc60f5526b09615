"""Pipelines of unusual build: what they hold, how they call their nets, and how they end."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from support.custom.base import Custom, Net, kind
from support.custom.kinds.forwards import net


@kind("a pipeline that holds a pipeline")
def holding(pipe: Any) -> None:
    class Outer(type(pipe)):  # type: ignore[misc]
        def begin(self, prompt: str) -> None:
            self.inner._guidance_scale = len(prompt)
            self.inner.scheduler.set_timesteps(3)

        def predict(self, *args: Any) -> Any:
            count = len(self.inner.scheduler.timesteps)
            return super().predict(*args) * (1 + self.inner._guidance_scale / 10 + count / 10)

    pipe.inner = Custom(pipe.unet, FlowMatchEulerDiscreteScheduler())
    pipe.__class__ = Outer


@kind("a pipeline that calls a pipeline")
def calling(pipe: Any) -> None:
    class Outer(type(pipe)):  # type: ignore[misc]
        def begin(self, prompt: str) -> None:
            generator = torch.Generator().manual_seed(len(prompt))
            self.draft = self.prior("cat", 3, generator=generator, output_type="pt").images

        def predict(self, i: int, x: Tensor, *rest: Any) -> Any:
            return super().predict(i, x, *rest) + 0.1 * self.draft.mean()

    pipe.prior = Custom(pipe.unet, FlowMatchEulerDiscreteScheduler(shift=3.0))
    pipe.prior.set_progress_bar_config(disable=True)
    pipe.__class__ = Outer


@kind("a pipeline made anew from the components in each call")
class Anew(Custom):
    def begin(self, prompt: str) -> None:
        other = Custom(**self.components)
        other._guidance_scale, other._interrupt = 1.0, False
        self.other = other

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return self.other.predict(i, x, t, words)


@kind("a pipeline that calls itself")
class Recursive(Custom):
    depth = 0

    def begin(self, prompt: str) -> None:
        self.scale = 1.0
        if prompt == "sea":
            generator = torch.Generator().manual_seed(9)
            answer = self("cat", 2, generator=generator, output_type="pt").images
            self.scheduler.set_timesteps(5)
            self.scale = 1 + float(answer.mean())

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return super().predict(i, x, t, words) * self.scale


@kind("steps without the denoiser")
class Skipping(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        if i % 2 == 0:
            self.kept = super().predict(i, x, t, words)
        return self.kept


class Autoencoder(Net):
    def decode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.tanh(self.first(x))))


@kind("an autoencoder in the loop")
class Decoding(Custom):
    def __init__(self, unet: Any, scheduler: Any, vae: Any = None) -> None:
        super().__init__(unet, scheduler)
        self.register_modules(vae=vae or Autoencoder().requires_grad_(False))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise = super().predict(i, x, t, words)
        return noise + 0.2 * self.vae.decode(x) * self.vae.decode(noise)


@kind("a plain module of torch as a component")
class PlainComponent(Custom):
    def __init__(self, unet: Any, scheduler: Any, adapter: Any = None) -> None:
        super().__init__(unet, scheduler)
        self.register_modules(adapter=adapter or nn.Conv2d(4, 4, 1).requires_grad_(False))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return super().predict(i, x, t, words) + 0.2 * self.adapter(x)


@kind("components that are changed in a call")
class Changing(Custom):
    def begin(self, prompt: str) -> None:
        self.before = self.scheduler
        other = FlowMatchEulerDiscreteScheduler(shift=len(prompt))
        other.set_timesteps(self._num_timesteps)
        self.register_modules(scheduler=other)

    def end(self, x: Tensor) -> Tensor:
        self.register_modules(scheduler=self.before)
        return x


@kind("a component that is taken out and put back")
class Removing(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        unet, self.unet = self.unet, None
        try:
            return unet(x, t, words)[0] * (1 if self.unet is None else 5)  # type: ignore[no-any-return]
        finally:
            self.unet = unet


@kind("attributes by __getattr__")
class Dynamic(Custom):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("scale_"):
            return float(name.removeprefix("scale_")) / 10 + self._guidance_scale
        return super().__getattr__(name)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return super().predict(i, x, t, words) * getattr(self, f"scale_{i}")


@kind("attributes by __setattr__")
class Setting(Custom):
    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).setdefault("_log", []).append(name)
        super().__setattr__(name, value)

    def begin(self, prompt: str) -> None:
        self._log.clear()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.now = i
        return super().predict(i, x, t, words) * (1 + 0.1 * len(self._log))


@kind("a loop in a generator function")
class Looping(Custom):
    def noises(self, words: Tensor) -> Iterator[Tensor]:
        x, t, scale = yield torch.zeros(())
        while True:
            scale += 0.1
            x, t, _ = yield scale * self.unet(x, t, words)[0]

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        if i == 0:
            self.loop: Any = self.noises(words)
            next(self.loop)
        noise: Tensor = self.loop.send((x, t, 1.0))
        return noise


@kind("all arguments by *args and **kwargs")
class Anything(Custom):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Hostile:
    """Neither copied nor pickled."""

    def __init__(self) -> None:
        self.lock, self.socket, self.value = threading.Lock(), socket.socket(), 0.0

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this is not copied")

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]


@kind("an object on self that cannot be copied")
class Uncopied(Custom):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.hostile = Hostile()

    def begin(self, prompt: str) -> None:
        self.hostile.value = len(prompt) / 10

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.hostile.value += 0.1
        return super().predict(i, x, t, words) * (1 + self.hostile.value)


class Momentum(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """A scheduler with memory, on itself and on its class."""

    total = 0.0

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)
        self.last, type(self).total = None, 0.0

    def step(self, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
        type(self).total += 0.1
        noise = noise if self.last is None else 0.7 * noise + 0.3 * self.last
        self.last = noise
        return super().step(noise * (1 + type(self).total), *args, **kwargs)


kind("a scheduler with memory on its class", scheduler=Momentum)(type("Pushed", (Custom,), {}))


@kind("a scheduler that holds its pipeline")
def scheduler_holds_pipe(pipe: Any) -> None:
    class Holding(type(pipe.scheduler)):  # type: ignore[misc]
        def step(self, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().step(noise * self.pipe._guidance_scale / 3, *args, **kwargs)

    pipe.scheduler.__class__ = Holding
    pipe.scheduler.pipe = pipe


class Answer(NamedTuple):
    sample: Tensor
    scale: float


@net("a named tuple as an answer")
class Named(Net):
    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return Answer(self.body(sample, timestep, words), 2.0)


@kind("nets called in other ways than by their name")
class Otherwise(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        calls: list[Callable[..., Any]] = [self.unet.forward, self.unet.__call__, self.unet.body]
        answer = calls[i % 3](x, t, words)
        return answer[0] if isinstance(answer, tuple) else answer  # type: ignore[no-any-return]


_EXECUTED: dict[str, Any] = {"Custom": Custom, "Net": Net}  # no `__name__`, as a notebook's tool
exec(
    """
class Counting(Custom):
    count = 0

    def begin(self, prompt):
        Counting.count = 0

    def predict(self, *args):
        Counting.count += 1
        return super().predict(*args) * (1 + 0.1 * Counting.count)


class CountingNet(Net):
    count = 0

    def forward(self, sample, timestep, words):
        self.count = 1 if float(timestep[0]) >= 1000 else self.count + 1
        return (self.body(sample, timestep, words) * (1 + 0.1 * self.count),)
""",
    _EXECUTED,
)
kind("a pipeline executed without a module")(_EXECUTED["Counting"])
net("a net executed without a module")(_EXECUTED["CountingNet"])
