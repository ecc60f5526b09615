"""State on the pipeline object: what each request must have for itself."""

import collections
import dataclasses
import weakref
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.custom.base import Custom, kind


@kind("a counter on self")
class Counter(Custom):
    def begin(self, prompt: str) -> None:
        self.count = 0

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.count += 1
        noise = super().predict(i, x, t, words)
        return noise * (1 + 0.1 * self.count)


@kind("a list on self")
class Listed(Custom):
    def begin(self, prompt: str) -> None:
        self.seen: Any = []

    def keep(self, noise: Tensor) -> None:
        self.seen.append(noise)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.keep(super().predict(i, x, t, words))
        return torch.stack([*self.seen]).mean(0)


@kind("a list on self that __init__ makes")
class ListedOnce(Listed):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.seen = []

    def begin(self, prompt: str) -> None:
        self.seen.clear()


@kind("a deque on self")
class Queued(Listed):
    def begin(self, prompt: str) -> None:
        self.seen = collections.deque(maxlen=2)


@kind("a dict on self")
class Mapped(Custom):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.cache: dict[Any, Any] = {}

    def begin(self, prompt: str) -> None:
        self.cache.clear()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.cache["last"] = super().predict(i, x, t, words) + 0.3 * self.cache.get("last", 0)
        last: Tensor = self.cache["last"]
        return last


@kind("a defaultdict of lists on self")
class Grouped(Custom):
    def begin(self, prompt: str) -> None:
        self.groups: dict[int, list[Tensor]] = collections.defaultdict(list)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.groups[i % 2].append(super().predict(i, x, t, words))
        return torch.stack(self.groups[i % 2]).mean(0)


@kind("a tensor on self that is written in place")
class InPlace(Custom):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.mean = torch.zeros(1, 4, 8, 8)

    def begin(self, prompt: str) -> None:
        self.mean.zero_()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return self.mean.mul_(0.5).add_(super().predict(i, x, t, words)).clone()


@kind("an array of numpy on self")
class Arrayed(Custom):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.weights = np.zeros(16, dtype=np.float32)

    def begin(self, prompt: str) -> None:
        self.weights[:] = 0

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.weights[i] = 1 / (i + 1)
        return super().predict(i, x, t, words) * float(self.weights.sum())


@kind("a torch generator on self")
class OwnGenerator(Custom):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.noise = torch.Generator()

    def begin(self, prompt: str) -> None:
        self.noise.manual_seed(len(prompt))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise = super().predict(i, x, t, words)
        return noise + 0.3 * torch.randn(x.shape, generator=self.noise)


@kind("a Python generator on self")
class Yielding(Custom):
    def begin(self, prompt: str) -> None:
        self.scales = iter(1 + 0.1 * n * len(prompt) for n in range(100))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return super().predict(i, x, t, words) * next(self.scales)


@kind("an object with slots on self")
class Slotted(Custom):
    class State:
        __slots__ = ("last",)

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.state = Slotted.State()

    def begin(self, prompt: str) -> None:
        self.state.last = None

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise = super().predict(i, x, t, words)
        last, self.state.last = self.state.last, noise
        return noise if last is None else (noise + last) / 2


@kind("a data class inside of a namespace on self")
class Nested(Custom):
    @dataclasses.dataclass
    class Inner:
        total: float = 0.0

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.space = SimpleNamespace(inner=Nested.Inner())

    def begin(self, prompt: str) -> None:
        self.space.inner.total = 0.0

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.space.inner.total += 0.1
        return super().predict(i, x, t, words) * (1 + self.space.inner.total)


@kind("attributes whose names are made at run time")
class Numbered(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        setattr(self, f"noise_{i}", super().predict(i, x, t, words))
        before: Tensor = getattr(self, f"noise_{max(0, i - 1)}")
        return 0.7 * vars(self)[f"noise_{i}"] + 0.3 * before


@kind("a cached property of the first latents")
class Cached(Custom):
    @cached_property
    def first_sample(self) -> Tensor:
        return self.sample

    def begin(self, prompt: str) -> None:
        vars(self).pop("first_sample", None)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.sample = x
        return super().predict(i, x, t, words) + 0.1 * self.first_sample


@kind("a weak reference to what self keeps")
class Weak(Custom):
    def begin(self, prompt: str) -> None:
        self.kept = torch.full((1, 4, 1, 1), len(prompt) / 10)
        self.reference = weakref.ref(self.kept)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise, kept = super().predict(i, x, t, words), self.reference()
        assert kept is not None
        return noise + kept


@kind("a bound method that self keeps")
class Bound(Counter):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.counted = self.count_up
        self.count = 0

    def count_up(self) -> int:
        self.count += 1
        return self.count

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        number = self.counted()
        noise = Custom.predict(self, i, x, t, words)
        return noise * (1 + 0.1 * self.count + 0.01 * number)


@kind("a helper on self that holds the pipeline")
class Helped(Custom):
    class Helper:
        def __init__(self, pipe: Any) -> None:
            self.pipe, self.calls = pipe, 0

        def scale(self) -> float:
            self.calls += 1
            return float(self.pipe.guidance_scale) + self.calls + len(self.pipe.scheduler.timesteps)

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.helper = Helped.Helper(self)

    def begin(self, prompt: str) -> None:
        self.helper.calls = 0

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return super().predict(i, x, t, words) * self.helper.scale() / 10
