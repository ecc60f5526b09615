"""Random numbers of all libraries, in pipelines and in nets, by names bound before any load."""

import random
from collections.abc import Callable
from random import gauss, seed
from typing import Any

import numpy as np
import torch
from numpy.random import normal
from torch import Tensor, nn, randn, randn_like

from support.custom.base import Custom, Net, kind
from support.custom.kinds.forwards import net

SHAPE = (1, 4, 8, 8)
_RANDOM, _NUMPY, _TORCH = random.Random(3), np.random.default_rng(3), torch.Generator()


def of_numpy(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


DRAWS: dict[str, Callable[[], Any]] = {
    "torch.randn": lambda: torch.randn(SHAPE),
    "torch.rand by a name bound before": lambda: randn(SHAPE),
    "randn_like by a name bound before": lambda: randn_like(torch.zeros(SHAPE)),
    "a tensor's own normal_": lambda: torch.empty(SHAPE).normal_(),
    "nn.init": lambda: nn.init.normal_(torch.empty(SHAPE)),
    "torch.randperm": lambda: torch.randperm(8).float().expand(SHAPE),
    "torch.bernoulli": lambda: torch.bernoulli(torch.full(SHAPE, 0.5)),
    "torch.distributions": lambda: torch.distributions.Normal(0.0, 1.0).sample(SHAPE),
    "dropout": lambda: nn.functional.dropout(torch.ones(SHAPE), 0.5, training=True),
    "numpy's global numbers": lambda: of_numpy(np.random.randn(*SHAPE)),
    "numpy's numbers by a name bound before": lambda: of_numpy(normal(size=SHAPE)),
    "numpy's legacy state": lambda: of_numpy(np.random.mtrand._rand.standard_normal(SHAPE)),
    "the random module": lambda: random.random(),
    "the random module by a name bound before": lambda: gauss(0, 1),
    "random's shuffle and choice": lambda: random.choice([0.1, 0.2, 0.3, 0.4, 0.5]),
    "random's hidden instance": lambda: random._inst.random(),  # type: ignore[attr-defined]
    "the seed of the process, read": lambda: (torch.initial_seed() % 97) / 97,
    "the state of the process, read and put back": lambda: _again(),
}


def _again() -> Tensor:
    state = torch.get_rng_state()
    first = torch.randn(SHAPE)
    torch.set_rng_state(state)
    return first + torch.randn(SHAPE)


def drawing(draw: Callable[[], Any]) -> type:
    class Drawing(Custom):
        def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
            before = draw()
            return super().predict(i, x, t, words) + 0.2 * (before + draw())

    return Drawing


for _name, _draw in DRAWS.items():
    kind(_name)(drawing(_draw))


@kind("seeds of its own for every generator, in each request")
class Seeding(Custom):
    def begin(self, prompt: str) -> None:
        seed(len(prompt))
        np.random.seed(len(prompt))
        torch.manual_seed(len(prompt))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise = super().predict(i, x, t, words)
        return noise * (1 + 0.1 * (random.random() + np.random.rand())) + 0.1 * torch.randn(SHAPE)


@kind("global generators that each request seeds")
class GlobalGenerators(Custom):
    def begin(self, prompt: str) -> None:
        global _NUMPY
        _RANDOM.seed(len(prompt))
        _NUMPY = np.random.default_rng(len(prompt))
        _TORCH.manual_seed(len(prompt))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise = super().predict(i, x, t, words) * (1 + 0.1 * _RANDOM.random())
        return noise + 0.1 * float(_NUMPY.random()) + 0.1 * torch.randn(SHAPE, generator=_TORCH)


@kind("a generator that global numbers seed")
class SeededByGlobal(Custom):
    def begin(self, prompt: str) -> None:
        self.own = np.random.default_rng(random.getrandbits(32))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return super().predict(i, x, t, words) + of_numpy(0.2 * self.own.standard_normal(SHAPE))


@net("a net that draws torch's global numbers")
class Noisy(Net):
    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return (self.body(sample, timestep, words) + 0.2 * torch.randn_like(sample),)


@net("a net that draws numpy's and random's global numbers")
class NoisyOtherwise(Net):
    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        scale = 1 + 0.2 * random.random() + 0.2 * float(np.random.rand())
        return (self.body(sample, timestep, words) * scale,)


@net("a net with dropout in train mode")
class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return (self.drop.train()(self.body(sample, timestep, words)),)


@net("a net that draws in a bound name")
class NoisyByName(Net):
    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return (self.body(sample, timestep, words) + 0.2 * randn(SHAPE) + 0.1 * gauss(0, 1),)


class Injecting(nn.Module):
    """As in LTX's VAE with `decoder_inject_noise`: noise of the global generator in a layer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[-2:], dtype=x.dtype)[None]
        answer: Tensor = self.inner(x) + 0.3 * noise
        return answer


@net("a layer that injects noise")
class Injected(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Injecting(self.middle)
