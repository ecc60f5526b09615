"""Modes and process-wide switches around a module's call, or around a whole request."""

import contextlib
import gc
import io
import logging.handlers
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.custom.base import ODD, Custom, Net, kind
from support.custom.kinds.forwards import net

Enter = Callable[[], contextlib.AbstractContextManager[Any]]


def around(name: str, enter: Enter, *, odd: bool = False, **options: Any) -> None:
    """A kind with a context around each call; `odd`: of one of the requests only."""

    class Around(Custom):
        def begin(self, prompt: str) -> None:
            self.enters = not odd or prompt == ODD

        def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
            with enter() if self.enters else contextlib.nullcontext():
                return super().predict(i, x, t, words).float()

    kind(name, **options)(Around)


def within(name: str, enter: Enter, **options: Any) -> None:
    """A kind with a context around the whole of one request, and nothing around the others."""

    class Within(Custom):
        def begin(self, prompt: str) -> None:
            self.stack = contextlib.ExitStack()
            if prompt == ODD:
                self.stack.enter_context(enter())

        def end(self, x: Tensor) -> Tensor:
            self.stack.close()
            return x.float()

    kind(name, **options)(Within)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        return answer * 1.5 if func is torch.tanh else answer


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        return answer * 1.5 if "tanh" in str(func) else answer


class Counting(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


@kind("a dispatch mode that counts operations")
class Counted(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        with Counting() as mode:
            noise = super().predict(i, x, t, words)
        return noise * (1 + 0.01 * mode.n)


@contextlib.contextmanager
def switched(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


class Spaced(Net):
    """Asks the switches of the process."""

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        more = 4 if torch.is_grad_enabled() else 1
        more *= 2 if sys.getrecursionlimit() == 4321 else 1
        more *= 2 if not gc.isenabled() else 1
        return (self.body(sample, timestep, words) + 0.1 * more,)


def bfloat16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def recursion() -> Any:
    return switched(sys.getrecursionlimit, sys.setrecursionlimit, 4321)


def collector() -> Any:
    return switched(gc.isenabled, lambda value: gc.enable() if value else gc.disable(), False)


class Typed(Net):
    """Shows in which number type it computes, far beyond rounding."""

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        answer = self.body(sample, timestep, words)
        return (answer + (1 if answer.dtype == torch.bfloat16 else 0),)


HALF: dict[str, Any] = {"close": 0.02, "net": Typed}  # bfloat16 in another batch

around("autocast around one request's calls", bfloat16, odd=True, **HALF)
around("a function mode", Doubling)
around("a function mode around one request's calls", Doubling, odd=True)

within("autocast for one whole request", bfloat16, **HALF)
within("gradients for one whole request", torch.enable_grad, net=Spaced)
within("a function mode for one whole request", Doubling)
within("a dispatch mode for one whole request", Dispatched)
within("the recursion limit of one whole request", recursion, net=Spaced)
within("the collector switched off for one whole request", collector, net=Spaced)
within("a function of torch patched by mock", lambda: mock.patch("torch.tanh", torch.sin))


_LOGGER = logging.getLogger("custom.logging")
_LOGGER.propagate = False


class Noisy(Net):
    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        _LOGGER.error("a step")
        print("a step")
        return (self.body(sample, timestep, words),)


@contextlib.contextmanager
def logged() -> Iterator[Callable[[], int]]:
    handler = logging.handlers.BufferingHandler(1000)
    _LOGGER.addHandler(handler)
    try:
        yield lambda: len(handler.buffer)
    finally:
        _LOGGER.removeHandler(handler)


@contextlib.contextmanager
def printed() -> Iterator[Callable[[], int]]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        yield lambda: len(text.getvalue())


def counted(name: str, record: Callable[[], Any]) -> None:
    class Recorded(Custom):
        def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
            with record() as count:
                noise = super().predict(i, x, t, words)
            return noise * (1 + 0.1 * count())

    kind(name, net=Noisy)(Recorded)


counted("records of a logger counted around each call", logged)
counted("what is printed counted around each call", printed)


@kind("a gradient through the net")
class Guided(Custom):
    """As classifier guidance and loss guidance: the net's answer is derived by its sample."""

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            noise = super().predict(i, x, t, words)
            gradient = torch.autograd.grad(noise.square().mean(), x)[0]
        return (noise - 10 * gradient).detach()


@net("a net that asks for gradients itself")
class AsksForGradients(Net):
    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        with torch.enable_grad():
            x = sample.detach().requires_grad_(True)
            answer = self.body(x, timestep, words)
            gradient = torch.autograd.grad(answer.square().sum(), x)[0]
        return (answer.detach() - 0.05 * gradient,)


@kind("a fork of the random numbers around each call")
class Forked(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            noise = super().predict(i, x, t, words) + 0.1 * torch.randn(1, 4, 8, 8)
        return noise + 0.1 * torch.randn(1, 4, 8, 8)
