"""Hooks, processors and patches of `forward` with state, as people add them to a pipeline's net."""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from support.custom.base import FIRST, Custom, Net, kind


class Memory:
    """Mixes each answer with the one before; begins anew at a request's first timestep."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def mixed(self, answer: Tensor, timestep: Tensor | None) -> Tensor:
        if timestep is not None and float(timestep[0]) >= FIRST:
            self.last = None
        answer = answer if self.last is None else 0.8 * answer + 0.2 * self.last
        self.last = answer
        return answer


@kind("a forward hook with memory")
def hook(pipe: Any) -> None:
    memory = Memory()
    pipe.unet.register_forward_hook(lambda m, args, out: (memory.mixed(out[0], args[1]),))


@kind("a hook with objects, slots, arrays and random numbers, that never begins anew")
def keeping(pipe: Any) -> None:
    inner = SimpleNamespace(own=type("Slotted", (), {"__slots__": ("calls",)})())
    inner.own.calls, array, generator = 0, np.zeros(1), torch.Generator().manual_seed(3)
    deep: Any = SimpleNamespace(calls=0)
    for _ in range(300):
        deep = [deep]

    def hook(more: Any, module: Any, args: Any, out: Any) -> Any:
        while isinstance(more, list):
            [more] = more
        more.calls, inner.own.calls = more.calls + 1, inner.own.calls + 1
        array[:] += more.calls + inner.own.calls + float(torch.rand((), generator=generator))
        return (out[0] * (1 + 0.1 * float(array[0])),)

    pipe.unet.register_forward_hook(functools.partial(hook, deep))


@kind("a forward pre-hook that counts")
def pre_hook(pipe: Any) -> None:
    box = {"n": 0}

    def count(module: Any, args: Any) -> Any:
        box["n"] = 1 if float(args[1][0]) >= FIRST else box["n"] + 1
        return (args[0] * (1 + 0.1 * box["n"]), *args[1:])

    pipe.unet.register_forward_pre_hook(count)


@kind("a hook on a child with memory, that the pipeline resets")
class HookOnChild(Custom):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.memory = Memory()
        unet.middle.register_forward_hook(lambda m, args, out: self.memory.mixed(out, None))

    def begin(self, prompt: str) -> None:
        self.memory.last = None


@kind("a hook that is added and removed in each call")
class HookInCall(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        handle = self.unet.register_forward_hook(lambda m, args, out: (out[0] * (1 + 0.1 * i),))
        try:
            return super().predict(i, x, t, words)
        finally:
            handle.remove()


@kind("a hook for the whole of a request")
class HookInRequest(Custom):
    def begin(self, prompt: str) -> None:
        scale = len(prompt) / 3
        self.handle = self.unet.register_forward_hook(lambda m, args, out: (out[0] * scale,))

    def end(self, x: Tensor) -> Tensor:
        self.handle.remove()
        return x


@kind("a global module hook for one request's calls")
class GlobalHook(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        def halve(module: Any, args: Any, output: Any) -> Any:
            return (output[0] / 2,) if isinstance(module, Net) else None

        handle = nn.modules.module.register_module_forward_hook(halve)
        try:
            return super().predict(i, x, t, words)
        finally:
            handle.remove()


class WithProcessors(Net):
    """Each of its layers asks a processor, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.processor: Any = lambda answer, timestep: answer

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return (self.processor(self.body(sample, timestep, words), timestep),)


@kind("an attention processor with memory", net=WithProcessors)
def processor(pipe: Any) -> None:
    pipe.unet.set_processor(Memory().mixed)


@kind("a processor with a controller that the pipeline steps", net=WithProcessors)
class Controlled(Custom):
    """As prompt-to-prompt: the controller is told of each step by the pipeline."""

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.step = 0
        unet.set_processor(lambda answer, t: answer * (1 + 0.1 * self.step))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.step = i
        return super().predict(i, x, t, words)


@kind("processors that are set for one request", net=WithProcessors)
class Exchanged(Custom):
    def begin(self, prompt: str) -> None:
        self.before, scale = self.unet.processor, len(prompt)
        self.unet.set_processor(lambda answer, t: answer * scale / 4)

    def end(self, x: Tensor) -> Tensor:
        self.unet.set_processor(self.before)
        return x


@kind("forward replaced on the instance, with a counter in its closure")
def on_instance(pipe: Any) -> None:
    inner, n = pipe.unet.forward, 0

    def forward(sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        nonlocal n
        n = 1 if float(timestep[0]) >= FIRST else n + 1
        return (inner(sample, timestep, words)[0] * (1 + 0.1 * n),)

    pipe.unet.forward = forward


@kind("forward replaced on the instance by a partial with a dict")
def with_partial(pipe: Any) -> None:
    def forward(state: dict[str, int], inner: Any, sample: Any, timestep: Any, words: Any) -> Any:
        state["n"] = 1 if float(timestep[0]) >= FIRST else state["n"] + 1
        return (inner(sample, timestep, words)[0] * (1 + 0.1 * state["n"]),)

    pipe.unet.forward = functools.partial(forward, {}, pipe.unet.forward)


class Patched(Net):
    pass


@kind("forward replaced on the class", net=Patched)
def on_class(pipe: Any) -> None:
    memory = Memory()

    def forward(self: Any, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return (memory.mixed(self.body(sample, timestep, words), timestep),)

    Patched.forward = forward  # type: ignore[method-assign]


@kind("the class of the net exchanged")
def exchanged_class(pipe: Any) -> None:
    class Other(type(pipe.unet)):  # type: ignore[misc]
        memory = Memory()

        def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
            answer = super().forward(sample, timestep, words)[0]
            return (self.memory.mixed(answer, timestep),)

    pipe.unet.__class__ = Other


@kind("the net wrapped in a module with memory")
def wrapped(pipe: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.memory = inner, Memory()
            self.config, self.dtype, self.device = inner.config, inner.dtype, inner.device

        def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
            return (self.memory.mixed(self.inner(sample, timestep, words)[0], timestep),)

    pipe.unet = Wrapper(pipe.unet).eval()


@kind("a child's forward replaced during a request")
class ChildReplaced(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        middle = self.unet.middle
        inner = middle.forward
        middle.forward = lambda x: inner(x) * (1 + 0.2 * i)
        try:
            return super().predict(i, x, t, words)
        finally:
            del middle.forward


@kind("a hook that reads the pipeline's step")
def hook_reads_pipe(pipe: Any) -> None:
    scale = lambda: 1 + 0.05 * (pipe.scheduler.step_index or 0)  # noqa: E731
    pipe.unet.register_forward_hook(lambda m, args, out: (out[0] * scale(),))


@kind("a net that holds its pipeline")
def holds_pipe(pipe: Any) -> None:
    class Holding(type(pipe.unet)):  # type: ignore[misc]
        def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
            scale = vars(self)["pipe"]._guidance_scale
            return (super().forward(sample, timestep, words)[0] * (1 + 0.1 * scale),)

    vars(pipe.unet)["pipe"] = pipe
    pipe.unet.__class__ = Holding


@kind("a parametrization that counts")
def parametrized(pipe: Any) -> None:
    class Growing(nn.Module):
        n = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.n += 1
            return weight * (1 + 0.05 * self.n)

    growing, register = Growing(), torch.nn.utils.parametrize.register_parametrization
    register(pipe.unet.middle, "weight", growing, unsafe=True)

    def reset(module: Any, args: Any) -> None:
        if float(args[1][0]) >= FIRST:
            growing.n = 0

    pipe.unet.register_forward_pre_hook(reset)
